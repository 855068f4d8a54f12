"""Sums over ranks: which of AITER's calls are made, with what, and what is left to the process group."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from services.worker.kernels.impl.aiter import _all_reduce, _host
from services.worker.kernels.impl.aiter._all_reduce import MAKE, SUM, SUM_AND_NORM, AllReduce
from services.worker.kernels.ops.rms_norm import normalized
from tests.services.worker.kernels.impl.aiter import custom
from tests.services.worker.kernels.impl.aiter.fake import install

OTHER = 3.0  # what each of the other rank's numbers is
CPU = torch.device("cpu")


class Custom:
    """A group of two ranks as AITER's object presents it, this one and one whose numbers are all OTHER."""

    def __init__(self, group: Any, device: Any, max_size: int = 4096) -> None:
        assert group is not None and device == CPU
        self.disabled, self.capturing, self._max_size = False, False, max_size

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
        assert use_1stage and len(input) <= 80
        if self.disabled:
            return None
        total = input + OTHER + residual_inp
        return normalized(total, weight, eps), total

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        yield
        self.capturing = False


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of this process alone: its sums leave numbers as they are."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


@pytest.fixture
def summed(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> AllReduce:
    give_custom(monkeypatch)
    return AllReduce(group, CPU)


def give_custom(monkeypatch: pytest.MonkeyPatch, exact: bool = False) -> None:
    install(monkeypatch, exact=exact)
    custom.give_custom(monkeypatch, Custom)


def test_small_sums_are_aiters_and_others_the_groups(summed: AllReduce) -> None:
    small, large, odd = torch.randn(4, 64), torch.randn(64, 64), torch.randn(3, 3)
    total = summed.sum(small)
    assert torch.equal(total, small + OTHER) and total is not small
    for x in (large, odd):
        assert summed.sum(x) is x


def test_a_group_that_cannot_leaves_all_to_rccl(summed: AllReduce) -> None:
    summed._custom.disabled = True
    x = torch.randn(4, 64)
    assert summed.sum(x) is x


def test_capture_reaches_the_group(summed: AllReduce) -> None:
    with summed.capture():
        assert summed._custom.capturing
    assert not summed._custom.capturing


def test_a_host_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    reason = SUM.missing()
    assert reason is not None and reason.startswith("aiter.dist.device_communicators.custom_all_reduce cannot be")


def test_a_host_with_it_is_not_missing(summed: AllReduce) -> None:
    assert MAKE.missing() is SUM.missing() is SUM_AND_NORM.missing() is None


def test_few_rows_are_normed_in_the_kernel_that_sums_them(summed: AllReduce, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the bounds two kernels are faster, or the one cannot; a group of one, as here, has no such kernel."""
    weight = torch.rand(64)
    assert summed.sum_and_norm(torch.ones(4, 64), torch.ones(4, 64), weight, 1e-6) is None
    monkeypatch.setattr(summed, "_norm_bytes", _all_reduce.NORM_BYTES[8])
    x, residual = torch.randn(2, 4, 64).unbind(0)
    both = summed.sum_and_norm(x, residual, weight, 1e-6)
    assert both is not None and torch.equal(both[1], x + OTHER + residual)
    assert torch.equal(both[0], normalized(both[1], weight, 1e-6))
    for rows, width in ((81, 64), (4, 8200), (512, 64), (4, 60)):
        x = torch.ones(rows, width)
        assert summed.sum_and_norm(x, x, torch.ones(width), 1e-6) is None, (rows, width)
    summed._custom.disabled = True
    assert summed.sum_and_norm(residual, residual, weight, 1e-6) is None


def test_an_older_norm_is_refused(summed: AllReduce, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(self: Any, input: Tensor, residual_inp: Tensor, weight: Tensor, eps: float) -> None: ...  # noqa: A002

    monkeypatch.setattr(Custom, "custom_fused_ar_rms", older)
    assert str(SUM_AND_NORM.missing()).endswith("custom_fused_ar_rms of this host does not take use_1stage")
    monkeypatch.delattr(Custom, "custom_fused_ar_rms")
    _host.bound.cache_clear()
    assert "has no aiter.dist.device_communicators.custom_all_reduce.CustomAllreduce" in str(SUM_AND_NORM.missing())
