"""What is wrong with hosts that we do not have, and what to do there."""

import json
from dataclasses import replace

import pytest

from services.worker.devices import Device, Link
from valence.doctor import (
    GIB,
    UNLIMITED,
    Cache,
    Finding,
    Host,
    Limits,
    Node,
    OpRow,
    document,
    judge,
    size_text,
)

GPU = Device(0, "amd", "AMD Instinct MI300X", "gfx942", 304, 192 * GIB, render="/dev/dri/renderD128")
WELL = Host(
    system={"system": "Linux"},
    versions={"torch": "2.10.0+rocm7.2", "triton": "3.7.0", "aiter": "0.1.20", "rocm": "7.2.4"},
    devices=[GPU, replace(GPU, index=1, links=(Link(0, "XGMI", 15, 64000),))],
    seen=2,
    limits=Limits(1 << 20, UNLIMITED, 64 * GIB),
    nodes=[Node("/dev/kfd", "crw-rw----", "0:render", 109, True)],
    caches=[Cache("AITER", "/cache", 1, 1)],
    cache_free=900 * GIB,
)


def found(host: Host) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in judge(host)]


def test_a_host_that_is_well() -> None:
    assert judge(WELL) == []
    assert judge(Host(system={}, versions={"torch": "2.13.0"})) == [], "a CPU is no fault"


def test_device_files_that_may_not_be_opened() -> None:
    render = Node("/dev/dri/renderD128", "crw-rw----", "0:render", 109, False)
    host = replace(WELL, nodes=[Node("/dev/kfd", "crw-rw----", "0:video", 44, False), render])
    (finding,) = judge(host)
    assert finding.level == "error" and finding.what == "this user may not open /dev/kfd, /dev/dri/renderD128"
    assert "group render (109), video (44)" in finding.do and "--group-add 44 --group-add 109" in finding.do


def test_devices_that_a_container_was_not_given() -> None:
    lost = [replace(GPU, index=-1, trouble="/dev/kfd is missing")]
    assert found(replace(WELL, devices=lost)) == [("error", "the driver lists 1 GPUs, and /dev/kfd is missing")]
    assert found(replace(WELL, devices=[GPU, *lost])) == [], "another container has the other one"


@pytest.mark.parametrize(
    ("changes", "level", "what"),
    [
        ({"seen": 0}, "error", "torch 2.10.0+rocm7.2 sees none of 2 GPUs"),
        ({"versions": {**WELL.versions, "triton": ""}}, "error", "Triton is not installed"),
        ({"versions": {**WELL.versions, "aiter": ""}}, "warning", "AITER is not installed"),
        ({"versions": {**WELL.versions, "rocm": "7.2.0"}}, "warning", "ROCm 7.2.0 crashes all-reduce"),
        ({"devices": [GPU, replace(GPU, compute_partition="CPX", memory_partition="NPS4")]}, "warning", "parted in"),
        ({"devices": [replace(GPU, arch="gfx90a")]}, "warning", "gfx90a is no architecture that AITER serves"),
        ({"limits": Limits(1024, UNLIMITED, 64 * GIB)}, "warning", "at most 1,024 open files"),
        ({"limits": Limits(1 << 20, 8 << 20, 64 * GIB)}, "warning", "at most 8 MiB may be locked"),
        ({"limits": Limits(1 << 20, UNLIMITED, 64 << 20)}, "warning", "/dev/shm has 64 MiB"),
        ({"cache_trouble": "/ cannot be written"}, "warning", "(/ cannot be written): every start compiles"),
        ({"cache_free": 3 * GIB}, "warning", "3.0 GiB are free for kernels"),
        ({"stale": ["/cache/jit/build/lock_a"]}, "warning", "locks of builds that are dead: 1, such as"),
        ({"run_dir_trouble": "the run directory /x is too long"}, "error", "is too long"),
        ({"ops_trouble": "no model at /x"}, "error", "no model at /x"),
    ],
)
def test_each_fault_is_found_and_comes_with_advice(changes: dict[str, object], level: str, what: str) -> None:
    (finding,) = judge(replace(WELL, **changes))  # type: ignore[arg-type]
    assert finding.level == level and what in finding.what and finding.do


def test_kernels_that_failed_their_test() -> None:
    rows = [
        OpRow(
            "linear",
            "torch",
            "aiter: ends by SIGSEGV in case 1x2; triton: raises OSError: x in case 3",
            "is the meaning",
        ),
        OpRow("rope", "triton", "aiter: cannot be imported: it hangs: no sign of life for 120 s", "3 cases right"),
        OpRow("draw", "triton", "aiter: cannot be imported: it hangs: no sign of life for 120 s", "3 cases right"),
        OpRow("argmax", "triton", "aiter: known bad: it is slow (a/b#1); numba: for CPUs", "3 cases right"),
        OpRow("embedding", "triton", "aiter: aiter does not implement it", "3 cases right"),
    ]
    assert found(replace(WELL, ops=rows)) == [
        ("error", "aiter cannot be imported: it hangs: no sign of life for 120 s"),
        ("error", "linear by aiter ends by SIGSEGV in case 1x2"),
        ("error", "linear by triton raises OSError: x in case 3"),
    ]


def test_errors_come_first() -> None:
    host = replace(WELL, limits=Limits(1024, 0, 0), run_dir_trouble="no")
    assert [level for level, _ in found(host)] == ["error", "warning", "warning", "warning"]


def test_a_document_for_programs() -> None:
    told = json.loads(json.dumps(document(WELL, judge(WELL))))
    assert told["ok"] and told["findings"] == [] and told["devices"][1]["links"][0]["kind"] == "XGMI"
    assert (
        told["limits"]["files"] == 1 << 20 and told["caches"][0]["name"] == "AITER" and told["nodes"][0]["group"] == 109
    )
    warned = document(WELL, [Finding("warning", "a", "b")])
    assert warned["ok"] and warned["findings"] == [{"level": "warning", "what": "a", "do": "b"}]
    assert not document(WELL, [Finding("error", "a", "b")])["ok"]


def test_sizes() -> None:
    assert [size_text(n) for n in (UNLIMITED, 3 * GIB, 192 * GIB, 5 << 20, 2048)] == [
        "any",
        "3.0 GiB",
        "192 GiB",
        "5 MiB",
        "2 KiB",
    ]
