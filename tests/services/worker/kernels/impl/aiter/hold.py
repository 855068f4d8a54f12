"""How an implementation by AITER is held against its op's meaning: every case, dtype, release and architecture.

The fake AITER stands for the real one; what the provider allocates starts as NaN, and pages come in the layout that
the implementation asks for.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gate import compare_outcomes, convert, outcome, place_of
from services.worker.kernels.layout import SHUFFLED, in_order, shuffled
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.registry import Case, Facts, Impl
from tests.services.worker.kernels.impl.aiter.fake import RELEASES, fp8_of, install
from tests.services.worker.kernels.impl.triton.hold import poisoned_allocations

ARCHES = ("gfx942", "gfx950")
DTYPES = (torch.bfloat16, torch.float16)


class Holder:
    """`hold(impl)` returns what of AITER was called, by case, dtype, release and architecture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None) -> None:
        """None: the AITER that is there, and only `run`."""
        self._patch = monkeypatch

    def __call__(
        self, impl: Impl[Any], *, cases: Sequence[Case] | None = None, quick: bool = False
    ) -> dict[str, list[str]]:
        """`quick`: one architecture and dtype."""
        assert self._patch is not None
        called: dict[str, list[str]] = {}
        for release in RELEASES:
            for arch in ARCHES[: 1 if quick else None]:
                fake = install(self._patch, release, arch)
                for dtype in DTYPES[: 1 if quick else None]:
                    for case in impl.op.cases if cases is None else cases:
                        fake.calls.clear()
                        if self.run(impl, case, arch, dtype):
                            name = f"{case.name} {str(dtype)[6:]} {release.partition(' ')[0]} {arch}"
                            called[name] = list(dict.fromkeys(fake.calls))
        assert called, f"{impl.op.name} refuses all cases"
        return called

    def run(self, impl: Impl[Any], case: Case, arch: str, dtype: torch.dtype) -> bool:
        """False if the implementation refuses the case."""
        held = Held(impl, case, arch, dtype)
        if not held.refused:
            held.run()
        return not held.refused


class Held:
    """One case of an implementation, as often as wanted: `run` raises AssertionError where it is not the meaning."""

    def __init__(self, impl: Impl[Any], case: Case, arch: str, dtype: torch.dtype) -> None:
        self._impl, self._case, self._arch, self._dtype = impl, case, arch, dtype
        self._facts = facts_of(impl, self._make(), arch, dtype)
        self.refused = impl.refuses(self._facts) is not None
        names = list(inspect.signature(impl.op.meaning).parameters)
        self._scratch = [f"argument.{names.index(name)}" for name in impl.op.scratch]

    def _make(self) -> tuple[Any, ...]:
        return made(self._case, self._dtype, self._arch)

    @cached_property
    def _wanted(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What the meaning gives, and what it was given."""
        before, arguments = outcome(None, self._make()), self._make()
        return outcome(self._impl.op.meaning(*arguments), arguments), before

    def run(self) -> None:
        got, (wanted, before) = self.got(), self._wanted
        for name in self._scratch:
            for one in (got, wanted, before):
                one.pop(name, None)
        place = f"{place_of(self._impl.op, self._case, self._dtype)} {self._arch}"
        compare_outcomes(got, wanted, before, self._impl.op.tolerances[self._dtype], place)

    def got(self) -> dict[str, Tensor]:
        """What the implementation gives."""
        given = in_layout(self._impl, self._make(), self._impl.layout(self._facts))
        with poisoned_allocations():
            result = self._impl.run(*given)
        return outcome(result, in_layout(self._impl, given, None))


@contextmanager
def native(arch: str) -> Iterator[None]:
    """Cases of ops are made in this architecture's fp8."""
    properties = SimpleNamespace(gcnArchName=f"{arch}:sramecc+:xnack-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.2")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        native_fp8.cache_clear()
        yield
    native_fp8.cache_clear()


def made(case: Case, dtype: torch.dtype, arch: str) -> tuple[Any, ...]:
    """The case's arguments as that architecture has them."""
    with native(arch):
        drawn = case.make(dtype)
    arguments: tuple[Any, ...] = convert(drawn, lambda x: in_8_bits(x, fp8_of(arch)))
    return arguments


def in_8_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cases are made with the 8-bit type of NVIDIA; each architecture has its own."""
    if x.element_size() != 1 or not x.is_floating_point():
        return x
    limit = torch.finfo(dtype).max
    return x.float().clamp(-limit, limit).to(dtype)


def in_layout(impl: Impl[Any], arguments: tuple[Any, ...], layout: str | None) -> tuple[Any, ...]:
    """The arguments with pages in a layout; None: back in order."""
    names = list(inspect.signature(impl.op.meaning).parameters)
    if "k_cache" not in names:
        return arguments
    k, v = names.index("k_cache"), names.index("v_cache")
    changed = list(arguments)
    if layout is None:
        changed[k], changed[v] = in_order(changed[k], changed[v])
    elif layout == SHUFFLED:
        changed[k], changed[v] = shuffled(changed[k], changed[v])
    return tuple(changed)


def facts_of(impl: Impl[Any], arguments: tuple[Any, ...], arch: str, dtype: torch.dtype) -> Facts:
    """As the engine states them."""
    names = list(inspect.signature(impl.op.meaning).parameters)
    if "k_cache" not in names:
        return Facts("cuda", arch, dtype)
    cache = arguments[names.index("k_cache")]
    _, block_tokens, num_heads, head_dim = cache.shape
    shapes = {"head_dim": head_dim, "num_kv_heads": num_heads, "block_tokens": block_tokens}
    return Facts("cuda", arch, dtype, shapes | {"kv_fp8": int(cache.element_size() == 1)})
