"""The kernel's files of hosts that we do not have, and the order in which ROCr counts GPUs."""

from pathlib import Path

import pytest

from services.worker.devices import arch_name, parse_cpus, parse_properties, read_devices
from tests.services.worker.recorded_devices import MI300X, MI325X, MI350X, MI355X, Board, plant, write


@pytest.mark.parametrize(
    ("board", "arch", "units", "gib"),
    [
        (MI300X, "gfx942", 304, 192),
        (MI325X, "gfx942", 304, 256),
        (MI350X, "gfx950", 256, 288),
        (MI355X, "gfx950", 256, 288),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_eight_whole_gpus(tmp_path: Path, board: Board, arch: str, units: int, gib: int, named: bool) -> None:
    plant(tmp_path, board, named=named)
    devices = read_devices(tmp_path)
    assert [device.index for device in devices] == list(range(8))
    assert {(d.vendor, d.product, d.arch, d.compute_units, d.memory_bytes) for d in devices} == {
        ("amd", board.name, arch, units, gib * 2**30)
    }
    assert {device.mode for device in devices} == {"SPX/NPS1"}
    assert [device.pci for device in devices[:2]] == ["0000:05:00.0", "0000:27:00.0"]
    assert [device.numa_node for device in devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert devices[0].cpus == tuple(range(96)) and devices[7].cpus == tuple(range(96, 192))
    assert [(link.device, link.kind, link.weight) for link in devices[0].links] == [
        (i, "XGMI", 15) for i in range(1, 8)
    ]
    assert not any(device.trouble for device in devices)


def test_parts_of_a_gpu_are_devices_of_their_own(tmp_path: Path) -> None:
    plant(tmp_path, MI300X, gpus=2, mode="CPX", memory="NPS4")
    devices = read_devices(tmp_path)
    assert len(devices) == 16 and {device.mode for device in devices} == {"CPX/NPS4"}
    assert {(device.compute_units, device.memory_bytes) for device in devices} == {(38, 24 * 2**30)}
    # the PCI device, and so the NUMA node, is that of the whole GPU
    assert [(device.pci, device.partition) for device in devices[7:9]] == [("0000:05:00.0", 7), ("0000:27:00.0", 0)]
    assert [device.render for device in devices[:2]] == ["/dev/dri/renderD128", "/dev/dri/renderD129"]
    near = {link.device for link in devices[0].links if link.weight == 13}
    assert near == set(range(1, 8)) and len(devices[0].links) == 15


def test_what_a_container_has_not_got_is_not_counted(tmp_path: Path) -> None:
    """The kernel refuses to read the node of a GPU that the container may not use; ROCr then does not count it."""
    plant(tmp_path, MI355X)
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number in (2, 3):
        (nodes / f"{number}/properties").unlink()
        (nodes / f"{number}/properties").mkdir()  # cannot be read, also by root
    (tmp_path / "dev/dri/renderD130").unlink()
    devices = read_devices(tmp_path)
    assert [(device.index, device.pci) for device in devices] == [
        (0, "0000:65:00.0"),
        (1, "0000:85:00.0"),
        (2, "0000:a7:00.0"),
        (3, "0000:c7:00.0"),
        (4, "0000:e5:00.0"),
        (-1, "0000:47:00.0"),
    ]
    assert devices[-1].trouble == "/dev/dri/renderD130 is missing"
    assert {link.device for link in devices[0].links} == {1, 2, 3, 4}
    (tmp_path / "dev/kfd").unlink()
    assert {device.trouble for device in read_devices(tmp_path)} == {"/dev/kfd is missing"}


def test_nvidia(tmp_path: Path) -> None:
    text = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 138\nGPU UUID: \t GPU-x\nBus Location: \t 0000:19:00.0\n"
    write(tmp_path / "proc/driver/nvidia/gpus/0000:19:00.0/information", text)
    write(tmp_path / "sys/bus/pci/devices/0000:19:00.0/numa_node", "1\n")
    write(tmp_path / "sys/devices/system/node/node1/cpulist", "4-5\n")
    (device,) = read_devices(tmp_path)
    assert (device.index, device.vendor, device.product, device.numa_node) == (0, "nvidia", "NVIDIA H200", 1)
    assert device.cpus == (4, 5) and device.pci == "0000:19:00.0"


def test_a_host_without_gpus(tmp_path: Path) -> None:
    assert read_devices(tmp_path) == []


def test_parts_of_the_form() -> None:
    assert [arch_name(version) for version in (90402, 90500, 90010, 110000, 0)] == [
        "gfx942",
        "gfx950",
        "gfx90a",
        "gfx1100",
        "",
    ]
    assert parse_cpus("0-2,8,10-11\n") == (0, 1, 2, 8, 10, 11) and parse_cpus("") == ()
    assert parse_properties("a 1\nname x\n\nb 2 3\n") == {"a": 1}
