"""How a call of the provider is held: as each release takes it on each architecture, and equal to the op's meaning."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import HALF
from services.worker.kernels.registry import Facts, Impl
from tests.services.worker.kernels.impl.aiter.cases import CASES
from tests.services.worker.kernels.impl.aiter.fake import NEW, RELEASES, install
from tests.services.worker.kernels.impl.aiter.hold import ARCHES, native
from tests.services.worker.kernels.impl.triton.hold import poisoned_allocations

BF16 = torch.bfloat16


def module_of(name: str) -> ModuleType:
    return import_module(f"services.worker.kernels.impl.aiter.{name}")


def impl_of(name: str) -> Impl[Any]:
    item: Impl[Any] = module_of(name).IMPL
    return item


@contextmanager
def host(monkeypatch: pytest.MonkeyPatch, release: str, arch: str) -> Iterator[pytest.MonkeyPatch]:
    """A host of this architecture with this release."""
    with native(arch), monkeypatch.context() as patch:
        install(patch, release, arch)
        yield patch


def hold(impl: Impl[Any], dtype: torch.dtype = BF16) -> None:
    """All cases of the op, result by result and written argument by written argument, within its tolerances."""
    tolerance = impl.op.tolerances[dtype]
    for case in CASES.get(impl.op.name, impl.op.cases):
        wanted, given = case.make(dtype), case.make(dtype)
        expected = results(impl, impl.op.meaning, wanted)
        with poisoned_allocations():
            got = results(impl, impl.run, given)
        assert len(expected) == len(got)
        for left, right in zip(got, expected, strict=True):
            assert left.dtype == right.dtype and left.shape == right.shape, case.name
            torch.testing.assert_close(
                left.double(),
                right.double(),
                rtol=tolerance.relative,
                atol=tolerance.absolute,
                msg=lambda text, name=case.name: f"{impl.op.name}/{name}: {text}",
            )


def results(impl: Impl[Any], run: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    returned = run(*arguments)
    found = list(returned) if isinstance(returned, tuple) else [] if returned is None else [returned]
    return found + [arguments[-1] for _ in impl.op.writes]


def check_calls(name: str, monkeypatch: pytest.MonkeyPatch, refused: Mapping[str, str] | None = None) -> None:
    """`refused`: the reason, by release or architecture; everywhere else it is bound and equal to the meaning."""
    impl = impl_of(name)
    for release in RELEASES:
        for arch in ARCHES:
            with host(monkeypatch, release, arch):
                reason = impl.refuses(Facts("cuda", arch, BF16))
                assert reason == (refused or {}).get(arch, (refused or {}).get(release))
                for dtype in HALF if reason is None else ():
                    if impl.refuses(Facts("cuda", arch, dtype)) is None:
                        hold(impl, dtype)


def refusal_of(
    name: str, monkeypatch: pytest.MonkeyPatch, shapes: Mapping[str, int], dtype: torch.dtype = BF16
) -> str | None:
    """What the newer release refuses on gfx950."""
    with host(monkeypatch, NEW, "gfx950"):
        return impl_of(name).refuses(Facts("cuda", "gfx950", dtype, shapes))
