import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.kernels import registry
from services.worker.kernels.layout import SHUFFLED, TOKENS
from services.worker.kernels.ops.all_reduce import all_reduce
from services.worker.kernels.ops.all_reduce_add_norm import all_reduce_add_norm
from services.worker.kernels.ops.paged_attention import paged_attention
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import BindError, Facts, Impl, all_ops, bind, find_for, find_impls

CPU = Facts("cpu")


def fast_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * weight + eps


def only_gpu(facts: Facts) -> str | None:
    return None if facts.device == "cuda" else "needs a GPU"


def finder(provider: str) -> tuple[dict[str, Impl[Any]], str]:
    if provider == "triton":
        return {"rms_norm": Impl(rms_norm, "triton", fast_norm, only_gpu)}, ""
    return {}, f"{provider} is not installed"


def test_every_op_is_complete() -> None:
    for name, op in all_ops().items():
        assert op.name == name and op.meaning.__doc__ and op.cases and torch.float32 in op.tolerances
        assert len({case.name for case in op.cases}) == len(op.cases)
        assert all(tolerance.why for tolerance in op.tolerances.values())


def test_binds_the_meaning_where_nothing_else_can() -> None:
    bindings = bind(("aiter", "triton", "torch"), CPU)
    assert {row.provider for row in bindings.table} == {"torch"}
    assert [row.op for row in bindings.table] == list(all_ops())
    assert bindings(rms_norm) is rms_norm.meaning


def test_takes_the_first_that_can_and_says_why_not_the_others() -> None:
    on_gpu = bind(("aiter", "triton", "torch"), Facts("cuda", "gfx942"), finder=finder)
    assert on_gpu(rms_norm) is fast_norm and on_gpu(silu_and_mul) is silu_and_mul.meaning
    reasons = {row.op: row for row in on_gpu.table}
    assert reasons["rms_norm"] == ("rms_norm", "triton", "aiter: aiter is not installed")
    assert reasons["silu_and_mul"].reason == "aiter: aiter is not installed; triton: triton does not implement it"
    on_cpu = bind(("aiter", "triton", "torch"), CPU, finder=finder)
    assert on_cpu(rms_norm) is rms_norm.meaning
    assert {row.op: row for row in on_cpu.table}["rms_norm"].reason.endswith("triton: needs a GPU")
    assert on_gpu.digest != on_cpu.digest == bind(("torch",), CPU).digest


def test_a_choice_is_met_or_an_error() -> None:
    gpu = Facts("cuda", "gfx942")
    chosen = bind(("triton", "torch"), gpu, {"rms_norm": "torch"}, finder)
    assert chosen(rms_norm) is rms_norm.meaning
    assert {row.op: row.reason for row in chosen.table}["rms_norm"] == "chosen"
    with pytest.raises(BindError, match=r"rms_norm.*cpu.*triton: needs a GPU"):
        bind(("torch",), CPU, {"rms_norm": "triton"}, finder)
    with pytest.raises(BindError, match=r"linear.*aiter is not installed"):
        bind(("torch",), CPU, {"linear": "aiter"}, finder)


def paged(provider: str, layout: str, refused: str = "", *names: str) -> dict[str, Impl[Any]]:
    """Implementations of all ops that take pages, or of `names`; the op `refused` cannot run."""
    found = {}
    for name, op in all_ops().items():
        if op.in_cache and (not names or name in names):
            reason = "has no kernel" if name == refused else None
            found[name] = Impl(op, provider, op.meaning, lambda facts, reason=reason: reason, lambda facts: layout)
    return found


def bind_paged(**impls: dict[str, Impl[Any]]) -> registry.Bindings:
    return bind((*impls, "torch"), Facts("cuda", "gfx942"), finder=lambda provider: (impls[provider], ""))


def test_ops_that_take_pages_agree_on_their_layout() -> None:
    cached = {name for name, op in all_ops().items() if op.in_cache}
    assert cached == {"kv_write", "rope_kv_write", "paged_attention"}
    both = bind_paged(aiter=paged("aiter", SHUFFLED), triton=paged("triton", TOKENS))
    assert both.layout == SHUFFLED and {both.provider(all_ops()[name]) for name in cached} == {"aiter"}
    alone = bind_paged(triton=paged("triton", TOKENS))
    assert alone.layout == TOKENS == bind(("torch",), CPU).layout
    assert both.digest != alone.digest


def test_a_layout_that_one_of_them_cannot_have_is_nobodys() -> None:
    lacking = bind_paged(aiter=paged("aiter", SHUFFLED, "kv_write"), triton=paged("triton", TOKENS))
    assert lacking.layout == TOKENS and lacking.provider(paged_attention) == "triton"
    reasons = {row.op: row.reason for row in lacking.table}
    assert reasons["paged_attention"] == "aiter: takes KV pages shuffled, and not all ops can"
    missing = bind_paged(aiter=paged("aiter", SHUFFLED, "", "paged_attention"), triton=paged("triton", TOKENS))
    assert missing.layout == TOKENS and missing.provider(paged_attention) == "triton"
    mixed = bind_paged(
        aiter=paged("aiter", SHUFFLED, "", "paged_attention"), triton=paged("triton", SHUFFLED, "", "kv_write")
    )
    assert mixed.layout == TOKENS and mixed.provider(paged_attention) == "torch"


def test_a_chosen_provider_decides_the_layout_of_all() -> None:
    impls = {"aiter": paged("aiter", SHUFFLED), "triton": paged("triton", TOKENS)}
    bindings = bind(
        ("aiter", "triton"),
        Facts("cuda", "gfx942"),
        {"paged_attention": "triton"} | {name: "torch" for name, op in all_ops().items() if not op.in_cache},
        lambda provider: (impls[provider], ""),
    )
    assert bindings.layout == TOKENS
    assert {row.provider for row in bindings.table if all_ops()[row.op].in_cache} == {"triton"}
    with pytest.raises(BindError, match=r"kv_write: no provider can run it .*aiter: takes KV pages shuffled"):
        bind(
            ("aiter", "torch"),
            Facts("cuda", "gfx942"),
            {"paged_attention": "torch", "kv_write": "aiter"},
            lambda provider: (impls[provider], ""),
        )


@pytest.mark.parametrize("kind", ["writes", "scratch"])
def test_an_op_names_only_arguments_of_its_own(kind: str) -> None:
    with pytest.raises(TypeError, match=r"fast_norm writes .*'y'"):
        registry.op((), {}, **{kind: ("x", "y")})(fast_norm)
    assert getattr(registry.op((), {}, **{kind: ("x",)})(fast_norm), kind) == ("x",)


def test_a_library_that_breaks_when_imported_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """AITER does so on a host without ROCm."""

    def broken(name: str) -> Any:
        raise RuntimeError("ROCm version file not found")

    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(registry.importlib, "import_module", broken)
    assert find_impls("aiter") == ({}, "aiter cannot be imported: ROCm version file not found")


def test_graphs_are_captured_in_the_contexts_of_the_ops_that_are_asked_for() -> None:
    entered: list[str] = []

    @contextmanager
    def around(name: str) -> Iterator[None]:
        entered.append(name)
        yield
        entered.append(f"{name} left")

    def sum_in_place(x: Tensor) -> None: ...

    summing, joined = partial(around, "sum"), all_reduce_add_norm
    impls = {
        "rms_norm": Impl(rms_norm, "triton", fast_norm, around_capture=partial(around, "norm")),
        "all_reduce": Impl(all_reduce, "triton", sum_in_place, around_capture=summing),
        "all_reduce_add_norm": Impl(joined, "triton", joined.meaning, around_capture=summing),
    }
    bindings = bind(("triton", "torch"), Facts("cpu"), finder=lambda provider: (impls, ""))
    bindings(all_reduce)
    bindings(joined)  # in the same context, which is entered once
    with bindings.capturing():
        assert entered == ["sum"]
    assert entered == ["sum", "sum left"]


def test_unknown_names_are_errors() -> None:
    with pytest.raises(BindError, match=r"'tirton'; known: aiter, triton, numba, torch"):
        bind(("tirton", "torch"), CPU)
    with pytest.raises(BindError, match=r"unknown op 'rmsnorm'.*rms_norm"):
        bind(("torch",), CPU, {"rmsnorm": "torch"})
    with pytest.raises(BindError, match="no provider can run it"):
        bind(("aiter",), CPU, finder=finder)


def test_a_different_signature_is_refused() -> None:
    def renamed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return x

    def untyped(x: Tensor, weight: Tensor, eps):  # type: ignore[no-untyped-def]
        return x

    for wrong in (renamed, untyped):
        with pytest.raises(TypeError, match="triton/rms_norm: signature"):
            Impl(rms_norm, "triton", wrong)


def test_a_provider_without_files_or_library_is_explained() -> None:
    found, reason = find_impls("no_such_provider")
    assert not found and reason == "no no_such_provider implementations in this build"


def test_a_worker_imports_no_kernels_of_other_devices() -> None:
    """Importing Triton and its kernels takes a second of each start."""
    code = (
        "import sys; from services.worker.kernels.registry import Facts, bind; "
        "bind(('triton', 'torch'), Facts('cpu')); bind(('numba', 'torch'), Facts('cuda')); "
        "print(*{'triton', 'numba'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.strip()


def test_triton_may_be_interpreted_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_impls", lambda provider: ({}, f"{provider} is asked"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert find_for(CPU, "triton") == ({}, "needs a GPU")
    assert find_for(Facts("cuda", "gfx942"), "numba") == ({}, "for CPUs")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert find_for(CPU, "triton") == ({}, "triton is asked")


def test_scales_of_each_token_are_only_for_those_that_take_them() -> None:
    def find(provider: str) -> tuple[dict[str, Impl[Any]], str]:
        taken = provider == "triton"
        run = paged_attention.meaning
        return {"paged_attention": Impl(paged_attention, provider, run, scales_each=taken)}, ""

    def attention(kv_fp8: int) -> tuple[str, str]:
        bindings = bind(("aiter", "triton", "torch"), Facts("cuda", shapes={"kv_fp8": kv_fp8}), finder=find)
        row = next(row for row in bindings.table if row.op == "paged_attention")
        return row.provider, row.reason

    assert attention(1) == ("aiter", "first choice")
    provider, reason = attention(2)
    assert provider == "triton" and "one scale for all keys and values" in reason
