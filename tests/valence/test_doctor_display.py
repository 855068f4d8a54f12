"""What a person sees of hosts that we do not have."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from services.worker.devices import Device, Link, read_devices
from tests.services.worker.recorded_devices import MI300X, MI355X, plant
from valence.doctor import GIB, UNLIMITED, Cache, Finding, Host, Limits, Node, OpRow
from valence.doctor_display import report

HOST = Host(
    system={"system": "Ubuntu 24.04", "kernel": "6.8"},
    versions={"torch": "2.10.0", "aiter": ""},
    limits=Limits(UNLIMITED, UNLIMITED, GIB),
    nodes=[Node(f"/dev/dri/renderD{128 + i}", "crw-rw----", "0:render", 109, True) for i in range(2)],
    groups=["app", "[render]"],
    caches=[Cache("AITER", "/cache/aiter", 3 * GIB, 1234, "31 modules")],
    cache_free=900 * GIB,
    run_dir="/run/valence",
    model="Qwen3-8B on gfx942",
    ops=[
        OpRow("linear", "aiter", "first choice", "12 cases right"),
        OpRow("rope", "triton", "aiter: ends by SIGSEGV in case 1x2", "not tested"),
    ],
)


def shown(host: Host, *findings: Finding, width: int = 160) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report(host, findings))
    console.file.close()
    return console.export_text()


@pytest.mark.parametrize("board", [MI300X, MI355X])
def test_eight_gpus(tmp_path: Path, board: object) -> None:
    plant(tmp_path, board)  # type: ignore[arg-type]
    text = shown(replace(HOST, devices=read_devices(tmp_path)))
    assert text.count("SPX/NPS1") == 8 and "96-191" in text and "All GPUs are linked to each other by XGMI." in text
    assert "renderD135" in text and "0000:e5:00.0" in text


def test_parts_of_gpus(tmp_path: Path) -> None:
    plant(tmp_path, MI300X, gpus=8, mode="CPX", memory="NPS4")
    text = shown(replace(HOST, devices=read_devices(tmp_path)))
    assert text.count("CPX/NPS4") == 64 and "0000:05:00.0/7" in text
    assert "Links: 448 of XGMI 13, 3584 of XGMI 15." in text


def test_links_that_are_not_alike_are_a_table() -> None:
    first = Device(0, "amd", "MI300X", links=(Link(1, "XGMI", 15, 0), Link(2, "PCIe", 40, 0)))
    others = [Device(i, "amd", "MI300X", links=(Link(0, kind, 15, 0),)) for i, kind in ((1, "XGMI"), (2, "PCIe"))]
    text = shown(replace(HOST, devices=[first, *others]))
    assert "Links (less is nearer)" in text and "PCIe 40" in text


def test_everything_else() -> None:
    text = shown(HOST)
    for part in (
        *("Ubuntu 24.04", "torch 2.10.0", "not there", "any number of open files, any locked memory, 1.0 GiB /dev/shm"),
        *("app, [render]", "No GPU: the worker runs on the CPU.", "31 modules", "1,234", "900 GiB free for caches"),
        *("/dev/dri/renderD128, /dev/dri/renderD129", "can be opened", "Ops: Qwen3-8B on gfx942", "12 cases right"),
        *("aiter: ends by SIGSEGV in case 1x2", "Nothing is wrong."),
    ):
        assert part in text, part
    assert "first choice" not in text


def test_the_verdict_says_what_to_do() -> None:
    text = shown(HOST, Finding("error", "it is broken", "repair it"), Finding("warning", "it is old", "[wait]"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    assert lines[-5:] == ["✗ it is broken", "→ repair it", "! it is old", "→ [wait]", "1 error, 1 warning"]


def test_what_cannot_be_used_is_marked() -> None:
    lost = Device(-1, "amd", "MI300X", trouble="/dev/kfd is missing")
    nodes = [Node("/dev/kfd", "crw-rw----", "0:render", 109, False)]
    text = shown(replace(HOST, devices=[lost], nodes=nodes, run_dir_trouble="no", ops=[]))
    assert "/dev/kfd is missing" in text and "may not be opened" in text and "cannot be used" in text
    assert "Ops:" not in text
