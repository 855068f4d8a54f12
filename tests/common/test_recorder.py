import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common import recorder
from common.protocol import Peer
from common.recorder import FILE_BYTES, RINGS, SLOT, Kind, Recorder, open_file, read

PEER = Peer("worker", 3, 0xABCD1234, "", 4711, 1000.5)


def path_of(run_dir: Path) -> Path:
    return next((run_dir / recorder.FOLDER).glob("*.ring"))


def run(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A process of its own: `PEER`, `open_file` and the like are there, `run_dir` is the first argument."""
    head = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom common.protocol import Peer\n"
        "from common.recorder import *\nrun_dir = Path(sys.argv[1])\n"
        "peer = Peer('worker', 3, 0xABCD1234, '', os.getpid(), 1000.5)\n"
    )
    command = [sys.executable, "-P", "-c", head + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_ring_keeps_the_newest_in_order() -> None:
    own = Recorder()
    for step in range(RINGS["steps"] + 5):
        own.steps.add(Kind.STEP, a=step)
    steps = own.read()["steps"]
    assert [event.a for event in steps] == list(range(5, RINGS["steps"] + 5))
    assert [event.mono_s for event in steps] == sorted(event.mono_s for event in steps)
    assert own.read()["requests"] == []


@pytest.mark.parametrize("number", [-1, 1 << 64, 1 << 200, 1 << 63])
def test_no_number_of_a_peer_can_raise(number: int) -> None:
    own = Recorder()
    own.requests.add(Kind.ROW, number, number, number, number, b"x" * 1000)
    (event,) = own.read()["requests"]
    assert event.seq == number % (1 << 64) and event.code == number % (1 << 32)
    assert event.text == "x" * recorder.TEXT_BYTES


def test_texts_cannot_touch_a_terminal() -> None:
    own = Recorder()
    own.life.add(Kind.STATE, text=b"\x1b[2J")
    own.life.add(Kind.STATE, text=b"\xff\xfe")
    assert [event.text for event in own.read()["life"]] == ["?", "\ufffd\ufffd"]


def test_details_behind_a_colon_stay_out() -> None:
    own = Recorder()
    own.sequence(7, "worker lost: step 5 gave token 123, outside the vocabulary")
    assert [event.text for event in own.read()["requests"]] == ["worker lost"]


def test_the_file_is_private_of_fixed_size_and_readable_while_its_process_runs(tmp_path: Path) -> None:
    own = open_file(tmp_path, PEER, "f00d")
    for number in range(3 * RINGS["requests"]):
        own.requests.add(Kind.FIRST_TEXT, number)
    path = path_of(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_size == FILE_BYTES < 1.5e6
    found = read(path)
    assert found is not None and found.peer == PEER and found.name == "worker-3" and found.alive
    assert [(event.kind, event.a, event.text) for event in found.rings["life"]] == [(Kind.STARTED, 4711, "f00d")]
    assert len(found.rings["requests"]) == RINGS["requests"]


def test_what_was_noted_outlives_kill_9(tmp_path: Path) -> None:
    code = "r = open_file(run_dir, peer, '')\nr.beat('ready', 0, 0, 0.5)\nr.steps.add(Kind.STEP, a=9)\n"
    ended = run(code + "os.kill(os.getpid(), signal.SIGKILL)", str(tmp_path))
    assert ended.returncode == -signal.SIGKILL
    found = read(path_of(tmp_path))
    assert found is not None and not found.alive and [event.a for event in found.rings["steps"]] == [9]
    assert [event.kind for event in found.rings["life"]] == [Kind.STARTED, Kind.STATE]
    assert found.last_sign[0] == found.rings["steps"][0].mono_s > found.beat[0] > 0


def test_who_looks_at_the_same_time_is_not_taken_for_its_owner(tmp_path: Path) -> None:
    run("open_file(run_dir, peer, '')", str(tmp_path))
    with open(path_of(tmp_path), "rb") as other:
        fcntl.flock(other.fileno(), fcntl.LOCK_SH)
        found = read(path_of(tmp_path))
    assert found is not None and not found.alive


def test_an_end_in_order_is_noted_by_the_process_itself(tmp_path: Path) -> None:
    code = "r = open_file(run_dir, peer, '')\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()\n"
    code += "print(r.read()['life'][-1].kind.name)"
    ended = run(code, str(tmp_path))
    assert ended.stdout.split() == ["STARTED"], ended.stderr  # its child is not it
    found = read(path_of(tmp_path))
    assert found is not None and found.rings["life"][-1].kind is Kind.ENDED


def test_without_room_nothing_is_left(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: blocks cannot be allocated."""
    code = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\nopen_file(run_dir, peer, '')"
    ended = run(code, str(tmp_path))
    assert "OSError" in ended.stderr and list((tmp_path / recorder.FOLDER).iterdir()) == []


def test_what_is_no_recording_is_not_read(tmp_path: Path) -> None:
    open_file(tmp_path, PEER, "")
    path = path_of(tmp_path)
    whole = path.read_bytes()
    for content in (b"", whole[:-1], b"x" + whole[1:], whole[:8] + b"\xff" * 4096 + whole[8 + 4096 :]):
        (tmp_path / "other").write_bytes(content)
        assert read(tmp_path / "other") is None
    assert read(tmp_path / "missing") is None
    os.truncate(path, 0)
    os.truncate(path, FILE_BYTES)
    assert read(path) is None


def test_slots_that_are_torn_or_unknown_are_left_out(tmp_path: Path) -> None:
    own = open_file(tmp_path, PEER, "")
    for number in range(1, 4):
        own.steps.add(Kind.STEP, a=number)
    path = path_of(tmp_path)
    content = bytearray(path.read_bytes())
    steps = FILE_BYTES - RINGS["steps"] * SLOT.size
    content[steps + 2 * SLOT.size - 1] ^= 1  # the second number of the slot of event 1
    content[steps + 3 * SLOT.size - 80 - 24 : steps + 3 * SLOT.size - 80 - 20] = b"\xff" * 4
    path.write_bytes(content)
    found = read(path)
    assert found is not None and [event.a for event in found.rings["steps"]] == [3]


def test_a_heartbeat_notes_only_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, wall = [100.0], [5000.0]
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(recorder.time, "time", lambda: wall[0])
    own = Recorder()

    def beat(after_s: float, state: str = "ready", refused: int = 0, jump_s: float = 0.0) -> list[str]:
        before = len(own.read()["life"])
        now[0] += after_s
        wall[0] += after_s + jump_s
        own.beat(state, refused, 0, 0.5)
        return [event.kind.name for event in own.read()["life"][before:]]

    assert beat(30.0, "starting") == ["STATE"]  # nobody was to beat before the first
    assert beat(0.5, "starting") == []
    assert beat(0.5) == ["STATE"]
    assert beat(0.5, refused=4) == ["LINKS"]
    assert beat(0.6, refused=4) == []
    assert beat(0.5, refused=4, jump_s=3600.0) == ["CLOCK"]
    assert beat(0.5, refused=4, jump_s=-60.0) == ["CLOCK"]
    assert beat(9.5, refused=4) == ["STALLED"]
    life = own.read()["life"]
    assert [(event.a, event.b) for event in life if event.kind is Kind.CLOCK] == [(3_600_000, 0), (0, 60_000)]
    assert [event.a for event in life if event.kind is Kind.STALLED] == [9000]


def test_steps_leave_room_for_other_events() -> None:
    own = Recorder()
    own.peers([PEER], [], "")
    for step in range(100):
        own.steps.add(Kind.STEP, a=step)
    kinds = [event.kind for event in recorder.newest(own.read(), 40)]
    assert kinds == [Kind.JOINED] + [Kind.STEP] * 10


def test_the_oldest_files_go(tmp_path: Path) -> None:
    for start_s in (3.0, 20.0, 100.0, 1000.0):
        (tmp_path / recorder.file_name(Peer("api", 0, 7, "", 1, start_s), "ring")).touch()
    (tmp_path / recorder.file_name(Peer("api", 10, 7, "", 1, 1.0), "ring")).touch()
    recorder.prune(tmp_path, "api-0.*.ring", 2)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["api-0.0000000100000.00000007.ring", "api-0.0000001000000.00000007.ring", kept[2]]
    assert kept[2].startswith("api-10.")
