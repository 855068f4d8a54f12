"""One GPU per worker process, and the CPUs near it."""

import os
from pathlib import Path
from typing import Any

import pytest

from common import config as configuration
from common import env
from services.worker import placement
from services.worker.devices import Device
from services.worker.placement import Seat, keep_to, take_seat
from tests.services.worker.recorded_devices import MI300X, plant, write

CONFIG = configuration.load(None, ["worker.device=cuda"])


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No list of GPUs is set, and nothing that a test sets stays."""
    for name in {*env.DEVICE_LISTS["amd"], *env.DEVICE_LISTS["nvidia"], "CUDA_DEVICE_ORDER"}:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The sets of CPUs that the process was told to keep to; it may run on all of 192."""
    sets: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(192)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: sets.append(set(cpus)))
    return sets


def test_each_worker_sees_the_gpu_of_its_number(tmp_path: Path, kept: list[set[int]]) -> None:
    plant(tmp_path, MI300X)
    seat = take_seat(CONFIG, 5, tmp_path)
    assert os.environ["ROCR_VISIBLE_DEVICES"] == "5" and seat.number == 0
    assert seat.device is not None and seat.device.pci == "0000:a7:00.0"
    assert kept == [set(range(96, 192))]


def test_a_list_that_is_set_is_narrowed(tmp_path: Path, kept: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, MI300X)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "6, 1,GPU-07386a321fa45d1e")
    seat = take_seat(CONFIG, 1, tmp_path)
    assert os.environ["ROCR_VISIBLE_DEVICES"] == "1" and seat.device is not None and seat.device.index == 1
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "6,1,GPU-07386a321fa45d1e")
    assert take_seat(CONFIG, 2, tmp_path) == Seat(0, None)  # which one that is nobody knows here
    assert os.environ["ROCR_VISIBLE_DEVICES"] == "GPU-07386a321fa45d1e"
    # an inner list counts within the outer one
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,3")
    assert take_seat(CONFIG, 1, tmp_path) == Seat(0, None)
    assert (os.environ["ROCR_VISIBLE_DEVICES"], os.environ["HIP_VISIBLE_DEVICES"]) == ("4,5,6,7", "3")
    assert kept == [set(range(96))]


def test_without_a_gpu_of_its_own_nothing_changes(tmp_path: Path, kept: list[set[int]]) -> None:
    """Choosing the device then says how many there are."""
    assert take_seat(CONFIG, 3, tmp_path) == Seat(3)
    plant(tmp_path, MI300X, gpus=2)
    assert take_seat(CONFIG, 2, tmp_path) == Seat(2)
    for settings in (["worker.device=cpu"], ["worker.kind=null"]):
        assert take_seat(configuration.load(None, settings), 0, tmp_path) == Seat(0)
    assert "ROCR_VISIBLE_DEVICES" not in os.environ and kept == []


def test_ranks_of_a_group_see_the_gpus_of_all(
    tmp_path: Path, kept: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each runs near its own."""
    plant(tmp_path, MI300X)
    config = configuration.load(None, ["worker.device=cuda", "worker.tensor_parallel=2"])
    seats = []
    for instance, rank in ((0, 0), (1, 1), (3, 0)):
        monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
        seat = take_seat(config, instance, tmp_path, rank)
        assert seat.device is not None
        seats.append((os.environ["ROCR_VISIBLE_DEVICES"], seat.number, seat.device.index))
    assert seats == [("0,1", 0, 0), ("2,3", 1, 3), ("6,7", 0, 6)]
    assert kept == [set(range(96)), set(range(96)), set(range(96, 192))]
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    assert take_seat(config, 4, tmp_path, 1) == Seat(9), "there is none"
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "5,1")
    assert take_seat(config, 0, tmp_path, 1).device is not None and os.environ["ROCR_VISIBLE_DEVICES"] == "5,1"


def test_the_first_gpu_for_all(tmp_path: Path, kept: list[set[int]]) -> None:
    plant(tmp_path, MI300X, mode="CPX")
    seat = take_seat(configuration.load(None, ["worker.device=cuda:0", "worker.near_cpus=false"]), 3, tmp_path)
    assert os.environ["ROCR_VISIBLE_DEVICES"] == "0" and seat.number == 0 and kept == []


def test_nvidia(tmp_path: Path) -> None:
    for bus in ("19", "2d"):
        write(tmp_path / f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information", "Model: \t\t NVIDIA H200\n")
    seat = take_seat(CONFIG, 1, tmp_path)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1" and os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert seat.device is not None and seat.device.pci == "0000:2d:00.0"


def test_only_cpus_that_it_may_use(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    sets: list[Any] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: sets.append(cpus))
    device = Device(0, "amd", "MI300X", numa_node=1, cpus=(3, 4, 5))
    keep_to(device)
    assert sets == [{3, 4}]
    keep_to(Device(0, "amd", "MI300X"))  # no NUMA node
    keep_to(Device(0, "amd", "MI300X", numa_node=1, cpus=(2, 3, 4, 5)))  # all of them are near
    assert len(sets) == 1
    keep_to(Device(0, "amd", "MI300X", numa_node=2, cpus=(8, 9)))
    assert len(sets) == 1 and "NUMA node 2" in caplog.text


def test_the_kernel_is_really_told() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    try:
        placement.keep_to(Device(0, "amd", "MI300X", numa_node=0, cpus=(one,)))
        assert os.sched_getaffinity(0) == {one}
    finally:
        os.sched_setaffinity(0, before)
