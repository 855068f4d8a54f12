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


def give_custom(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    module = ModuleType("aiter.dist.device_communicators.custom_all_reduce")
    module.CustomAllreduce = Custom  # type: ignore[attr-defined]
    for name in ("aiter.dist", "aiter.dist.device_communicators"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


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
    reason = missing()
    assert reason is not None and reason.startswith("aiter.dist.device_communicators.custom_all_reduce cannot be")


def test_a_host_with_it_is_not_missing(summed: AllReduce) -> None:
    assert missing() is None
