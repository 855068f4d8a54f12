"""What amd-smi, rocminfo and nvidia-smi print, in the forms of several releases."""

from collections.abc import Sequence

import pytest

from services.worker import device_tools
from services.worker.device_tools import (
    AMD_STATIC,
    AMD_TOPOLOGY,
    ask,
    find_devices,
    from_amd_smi,
    from_nvidia_smi,
    from_rocminfo,
)
from services.worker.devices import Device, Link
from tests.services.worker.recorded_devices import (
    MI300X,
    MI325X,
    MI350X,
    MI355X,
    ROCMINFO,
    Board,
    amd_smi_static,
    amd_smi_topology,
)


@pytest.mark.parametrize("board", [MI300X, MI325X, MI350X, MI355X])
@pytest.mark.parametrize(("wrapped", "old"), [(True, False), (False, False), (False, True)])
def test_amd_smi(board: Board, wrapped: bool, old: bool) -> None:
    devices = from_amd_smi(amd_smi_static(board, 8, "SPX", wrapped, old), amd_smi_topology(8))
    assert [device.index for device in devices] == list(range(8))
    first = devices[0]
    assert (first.product, first.compute_units, first.memory_bytes) == (
        board.name,
        board.compute_units,
        board.memory_bytes,
    )
    assert first.arch in ("gfx942", "gfx950") and first.mode == "SPX/NPS1" and first.pci == "0000:05:00.0"
    assert [device.numa_node for device in devices] == [0] * 4 + [1] * 4
    assert first.links == tuple(Link(i, "XGMI", 15, 100000) for i in range(1, 8))


def test_amd_smi_that_knows_little() -> None:
    text = '[{"gpu": 0, "asic": {"market_name": "N/A", "num_compute_units": "N/A"}, "vram": {"size": "192 GB"}}]'
    (device,) = from_amd_smi(text)
    assert (device.product, device.compute_units, device.memory_bytes) == ("AMD GPU", 0, 192 * 2**30)
    assert device.numa_node == -1 and device.mode == ""
    for text in ("", "amdgpu not found", "{}", "[]", '{"gpu_data": [3]}'):
        assert from_amd_smi(text) == []


def test_rocminfo() -> None:
    (device,) = from_rocminfo(ROCMINFO)
    assert (device.index, device.product, device.arch) == (0, "AMD Instinct MI300X", "gfx942")
    assert (device.compute_units, device.memory_bytes, device.pci) == (304, 201310208 * 1024, "0000:1b:00.0")
    assert from_rocminfo("ROCk module is NOT loaded, possibly no GPU devices\n") == []


def test_nvidia_smi() -> None:
    (device,) = from_nvidia_smi("NVIDIA H200, 143771, 9.0, 00000000:19:00.0\n")
    assert (device.product, device.arch, device.memory_bytes) == ("NVIDIA H200", "sm_90", 143771 * 2**20)
    assert device.pci == "0000:19:00.0"
    assert from_nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate\n") == []


def test_asks_the_next_tool_where_one_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tools, "read_devices", list)
    asked: list[Sequence[str]] = []

    def only(answers: dict[str, str]) -> list[Device]:
        def answer(command: Sequence[str]) -> str:
            asked.append(command)
            return answers.get(" ".join(command), "")

        asked.clear()
        return find_devices(answer)

    smi = {" ".join(AMD_STATIC): amd_smi_static(MI300X, 2), " ".join(AMD_TOPOLOGY): amd_smi_topology(2)}
    assert len(only(smi)) == 2 and asked == [AMD_STATIC, AMD_TOPOLOGY]
    assert len(only({"rocminfo": ROCMINFO})) == 1
    assert only({}) == [] and asked[-1][0] == "nvidia-smi"


def test_what_the_kernel_tells_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [
        Device(0, "nvidia", "NVIDIA H200", pci="0000:19:00.0"),
        Device(1, "nvidia", "NVIDIA H200", pci="0000:2d:00.0"),
    ]
    monkeypatch.setattr(device_tools, "read_devices", lambda: known)
    devices = find_devices(lambda command: "NVIDIA H200, 143771, 9.0, 00000000:19:00.0\n")
    assert [device.arch for device in devices] == ["sm_90", ""] and devices[0].memory_bytes == 143771 * 2**20


def test_a_tool_that_is_not_there_fails_or_hangs_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(["no-such-tool-at-all"]) == ""
    assert ask(["sh", "-c", "echo half; exit 3"]) == ""
    assert ask(["echo", "well"]) == "well\n"
    monkeypatch.setattr(device_tools, "ASK_S", 0.05)
    assert ask(["sleep", "60"]) == ""
