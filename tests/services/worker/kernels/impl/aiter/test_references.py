"""The fake AITER notices what would go wrong on the real one: the provider with one thing changed fails its tests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import (
    _attention,
    _gate,
    _norm,
    _pages,
    _rotation,
    kv_write,
    paged_attention,
    rms_norm,
    rope,
    silu_and_mul,
)
from services.worker.kernels.impl.aiter._host import Function
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Impl
from tests.services.worker.kernels.impl.aiter.cases import ATTENTION, KV_WRITE, ROPE_KV_WRITE
from tests.services.worker.kernels.impl.aiter.hold import Holder


def changed(function: Function, change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """The function with other arguments."""

    def call(**arguments: Any) -> Any:
        change(arguments)
        return function(**arguments)

    call.missing = function.missing  # type: ignore[attr-defined]
    return call


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments.update({new: arguments.pop(old)})


def put(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments.update({name: change(arguments[name])})


def by_token(pages: Tensor) -> Tensor:
    """The same memory, read in the other layout."""
    return pages.view(-1, pages.shape[3], pages.shape[1], pages.shape[2] * pages.shape[4])


# Beside what test_mutants.py does to every call by itself.
MUTANTS: list[tuple[str, Impl[Any], Any, str, Callable[[dict[str, Any]], None]]] = [
    ("keyword missing", rms_norm.IMPL, _norm, "RMS_NORM", lambda arguments: arguments.pop("weight")),
    ("halves swapped", silu_and_mul.IMPL, _gate, "SILU", put("input", lambda x: torch.cat(x.chunk(2, -1)[::-1], -1))),
    ("strided angles", rope.IMPL, _rotation, "ROTATE", put("cos", lambda x: x.repeat(1, 1, 1, 2)[..., ::2])),
    ("negated sines", rope.IMPL, _rotation, "ROTATE", put("sin", Tensor.neg)),
    ("pages swapped", kv_write.IMPL, _pages, "WRITE", renamed("key", "value")),
    ("8 bits not bounded", kv_write.IMPL, _pages, "_within", lambda arguments: None),
    ("assembly's layout", paged_attention.IMPL, _attention, "ASSEMBLY", put("K", by_token)),
    ("prefill's layout", paged_attention.IMPL, _attention, "PREFILL", put("v", by_token)),
    ("prefill's window", paged_attention.IMPL, _attention, "PREFILL", put("window_size", lambda w: (w[0] + 1, 0))),
    ("prefill's bound", paged_attention.IMPL, _attention, "PREFILL", put("max_seqlen_k", lambda bound: 8)),
]
CASES = {"kv_write": KV_WRITE, "rope_kv_write": ROPE_KV_WRITE, "paged_attention": ATTENTION}


@pytest.mark.parametrize(("impl", "module", "name", "change"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_a_changed_call_fails(
    hold: Holder,
    monkeypatch: pytest.MonkeyPatch,
    impl: Impl[Any],
    module: Any,
    name: str,
    change: Callable[[dict[str, Any]], None],
) -> None:
    original = getattr(module, name)
    if isinstance(original, Function):
        monkeypatch.setattr(module, name, changed(original, change))
    else:
        monkeypatch.setattr(module, name, lambda x, *others: x)
    with pytest.raises((AssertionError, TypeError, RuntimeError, IndexError)):
        hold(impl, cases=CASES.get(impl.op.name), quick=True)


def test_starts_that_count_from_another_rows_tokens_fail(hold: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        AttentionRows, "chunk_starts", property(lambda rows: rows.query_starts[rows.num_decode :]), raising=True
    )
    with pytest.raises(AssertionError, match="counted from the first row"):
        hold(paged_attention.IMPL, cases=ATTENTION, quick=True)


def test_pages_of_the_other_layout_fail(hold: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the cache had been laid out for another provider: the memory is the same, the numbers are elsewhere."""
    made = _attention.Pages.__init__

    def misread(pages: Any, keys: Tensor, values: Tensor) -> None:
        if keys.dim() == 5:
            keys, values = by_token(keys), values.view(-1, keys.shape[3], keys.shape[1], values.shape[3])
        made(pages, keys, values)

    monkeypatch.setattr(_attention.Pages, "__init__", misread)
    with pytest.raises(AssertionError):
        hold(paged_attention.IMPL, cases=ATTENTION[:1], quick=True)
