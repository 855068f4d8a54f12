"""The sum over ranks in place: AITER's where there are ranks, nothing where there are none; graphs in its context."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist

from services.worker.kernels.impl.aiter import _all_reduce
from services.worker.kernels.impl.aiter._all_reduce import around_capture
from services.worker.kernels.impl.aiter.all_reduce import IMPL, refuses
from services.worker.kernels.registry import Facts
from tests.services.worker.kernels.impl.aiter.fake import install
from tests.services.worker.kernels.impl.aiter.test__all_reduce import CPU, OTHER, give_custom

MI300 = Facts("cuda", "gfx942", torch.bfloat16)


@pytest.fixture
def group() -> Iterator[None]:
    """Of this process alone: its sums leave numbers as they are."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _all_reduce.of_process.cache_clear()
    yield
    _all_reduce.of_process.cache_clear()
    dist.destroy_process_group()


def test_a_process_has_one_made_by_its_first_sum(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    give_custom(monkeypatch)
    monkeypatch.setattr(_all_reduce, "own_device", lambda: CPU)
    x, large = torch.ones(4, 64), torch.ones(64, 64)
    IMPL.run(x)
    IMPL.run(large)
    IMPL.run(torch.empty(0, 64))
    assert torch.equal(x, torch.full((4, 64), 1 + OTHER)) and torch.equal(large, torch.ones(64, 64))
    custom = _all_reduce.of_process()._custom
    with around_capture():
        assert custom.capturing
    assert not custom.capturing


def test_a_process_alone_sums_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    give_custom(monkeypatch)
    x = torch.ones(4, 64)
    IMPL.run(x)
    with around_capture():
        assert torch.equal(x, torch.ones(4, 64))


def test_refuses_other_gpus_and_hosts_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert "custom_all_reduce cannot be imported" in str(refuses(MI300))
    give_custom(monkeypatch)
    assert refuses(MI300) is None
    assert refuses(Facts("cuda", "sm_90", torch.bfloat16)) == "needs gfx942 or gfx950"
