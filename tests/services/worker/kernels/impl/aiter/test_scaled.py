"""A call of the provider that is wrong in a keyword, a dtype or a layout is found by the tests of its op."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from services.worker.kernels.impl.aiter import _moe
from services.worker.kernels.impl.aiter._host import Function
from services.worker.kernels.registry import Facts
from tests.services.worker.kernels.impl.aiter.calls import BF16, hold, host, impl_of, module_of
from tests.services.worker.kernels.impl.aiter.fake import NEW
from tests.services.worker.kernels.impl.aiter.hold import ARCHES

Mutation = Callable[[pytest.MonkeyPatch], None]


def renamed(patch: pytest.MonkeyPatch) -> None:
    """Every keyword is another."""
    call = Function.__call__
    patch.setattr(Function, "__call__", lambda self, **given: call(self, **{f"{k}_": v for k, v in given.items()}))


def plain_weights(patch: pytest.MonkeyPatch) -> None:
    """Weights go to AITER as rows although they are called tiles."""
    module = module_of("row_scaled_linear")
    tiled = module.as_matrix
    patch.setattr(module, "as_matrix", lambda tiles: tiled(tiles.transpose(-3, -2).contiguous()))


def by_row(patch: pytest.MonkeyPatch) -> None:
    """Scales are never by column."""
    module = module_of("quantize_groups")
    call = module.BY_GROUP
    patch.setattr(module, "BY_GROUP", lambda **given: call(**{**given, "transpose_scale": False}))


def unmarked(patch: pytest.MonkeyPatch) -> None:
    """Experts lack AITER's mark."""
    patch.setattr(module_of("moe_row_scaled"), "shuffled", _moe.as_matrix)


def other_fp8(patch: pytest.MonkeyPatch) -> None:
    """Numbers are in the other architecture's fp8."""
    module = module_of("quantize_rows")
    other = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e4m3fnuz: torch.float8_e4m3fn}
    call = module.BY_TOKEN
    patch.setattr(module, "BY_TOKEN", lambda x, quant_dtype: call(x=x, quant_dtype=other[quant_dtype]))


def other_scales(patch: pytest.MonkeyPatch) -> None:
    """Scales by block are announced as scales by row."""
    module = module_of("moe_block_scaled")
    call = module.add_fused
    patch.setattr(module, "add_fused", lambda *given: call(*given[:-1], "per_Token"))


def unpadded(patch: pytest.MonkeyPatch) -> None:
    """Heads are as many as the model's."""
    patch.setattr(module_of("mla_decode"), "padded_heads", lambda num_heads, *others: num_heads)


MUTATIONS: list[tuple[str, Mutation]] = [
    ("quantize_rows", renamed),
    ("mla_decode", renamed),
    ("row_scaled_linear", plain_weights),
    ("quantize_groups", by_row),
    ("moe_row_scaled", unmarked),
    ("quantize_rows", other_fp8),
    ("moe_block_scaled", other_scales),
    ("mla_decode", unpadded),
]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("name", "mutate"), MUTATIONS, ids=[f"{name}-{m.__name__}" for name, m in MUTATIONS])
def test_a_wrong_call_is_found(name: str, mutate: Mutation, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with host(monkeypatch, NEW, arch) as patch:
        hold(impl_of(name))
        mutate(patch)
        with pytest.raises((AssertionError, TypeError, RuntimeError, KeyError)):
            hold(impl_of(name))


NAMES = {name for name, _ in MUTATIONS}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_other_hosts_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", ModuleType("aiter"))
    assert impl_of(name).refuses(Facts("cuda", "sm_90", BF16)) == "needs gfx942 or gfx950"
    reason = impl_of(name).refuses(Facts("cuda", "gfx950", BF16)) or ""
    assert reason.startswith("this host has no aiter.") or "cannot be imported" in reason
