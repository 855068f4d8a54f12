"""Sums over ranks: which of AITER's calls are made, with what, and what is left to the process group."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from services.worker.kernels.impl.aiter._all_reduce import AllReduce, missing
from services.worker.kernels.ops.add_rms_norm import add_rms_norm
from tests.services.worker.kernels.impl.aiter.fake import install

OTHER = 3.0  # what each of the other rank's numbers is
CPU = torch.device("cpu")


class Newer:
    """A group of two ranks as AITER's object presents it, this one and one whose numbers are all OTHER."""

    def __init__(self, group: Any, device: Any, max_size: int = 4096) -> None:
        assert group is not None and device == CPU
        self.disabled, self.closed, self.capturing, self._max_size = False, False, False, max_size

    def custom_all_reduce(self, input: Tensor, open_fp8_quant: bool = False) -> Tensor | None:  # noqa: A002
        assert not open_fp8_quant and input.is_contiguous()
        if self.disabled or input.nbytes % 16 or input.nbytes > self._max_size:
            return None
        return input + OTHER

    def custom_fused_ar_rms(
        self,
        input: Tensor,  # noqa: A002
        residual_inp: Tensor,
        weight: Tensor,
        eps: float,
        use_1stage: bool,
    ) -> tuple[Tensor, Tensor] | None:
        assert use_1stage is False
        total = self.custom_all_reduce(input)
        return None if total is None else add_rms_norm.meaning(total, residual_inp, weight, eps)

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        yield
        self.capturing = False

    def close(self) -> None:
        self.closed = True


class Older(Newer):
    def custom_fused_ar_rms(self, input: Tensor, residual_inp: Tensor, weight: Tensor, eps: float) -> Any:  # type: ignore[override]  # noqa: A002
        """The other way round."""
        normed, total = super().custom_fused_ar_rms(input, residual_inp, weight, eps, False) or (None, None)
        return total, normed


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of this process alone: its sums leave numbers as they are."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


@pytest.fixture(params=[Newer, Older])
def summed(request: pytest.FixtureRequest, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> AllReduce:
    install(monkeypatch)
    module = ModuleType("aiter.dist.device_communicators.custom_all_reduce")
    module.CustomAllreduce = request.param  # type: ignore[attr-defined]
    for name in ("aiter.dist", "aiter.dist.device_communicators"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return AllReduce(group, group, CPU)


def test_small_sums_are_aiters_and_others_the_groups(summed: AllReduce) -> None:
    assert summed.enabled
    small, large, odd = torch.randn(4, 64), torch.randn(64, 64), torch.randn(3, 3)
    assert torch.equal(summed.sum(small), small + OTHER)
    for x in (large, odd):
        result = summed.sum(x)
        assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()


def test_sum_and_norm_is_the_sum_then_the_norm(summed: AllReduce) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(64, generator=generator).bfloat16()
    for rows, others in ((4, OTHER), (64, 0.0)):
        x, residual = torch.randn(2, rows, 64, generator=generator).bfloat16().unbind(0)
        normed, total = summed.sum_and_norm(x, residual, weight, 1e-5)
        wanted = add_rms_norm.meaning(x + others, residual, weight, 1e-5)
        torch.testing.assert_close(normed, wanted[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(total, wanted[1], rtol=2e-2, atol=2e-2)


def test_a_group_that_cannot_leaves_all_to_rccl(summed: AllReduce) -> None:
    summed._custom.disabled = True
    x = torch.randn(4, 64)
    assert not summed.enabled and torch.equal(summed.sum(x), x)


def test_capture_and_close_reach_the_group(summed: AllReduce) -> None:
    with summed.capture():
        assert summed._custom.capturing
    assert not summed._custom.capturing
    summed.close()
    assert summed._custom.closed


def test_only_releases_that_can_choose_fuse(summed: AllReduce) -> None:
    assert summed.fuses_norm == (type(summed._custom) is Newer)


def test_a_host_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    reason = missing()
    assert reason is not None and reason.startswith("aiter.dist.device_communicators.custom_all_reduce cannot be")


def test_a_host_with_it_is_not_missing(summed: AllReduce) -> None:
    assert missing() is None
