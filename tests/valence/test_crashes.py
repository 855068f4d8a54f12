import os
from pathlib import Path

import pytest

from common import crash
from common.recorder import Kind, file_name
from tests.valence.recorded import DEAD_PID, noted
from valence.crashes import afterwards, crashes, killed, recordings
from valence.errors import CommandError
from valence.story import ask

LOG = """\
2026-11-29 21:40:00,079 INFO spawned: 'worker-0' with pid 17
2026-11-29 21:40:01,079 INFO success: worker-0 entered RUNNING state, process has stayed up for > than 1 seconds
2026-11-29 21:40:02,079 INFO spawned: 'worker-1' with pid 18
2026-11-29 21:40:54,079 WARN exited: worker-0 (terminated by SIGKILL; not expected)
2026-11-29 21:40:54,126 INFO spawned: 'worker-0' with pid 3487
2026-11-29 21:40:55,127 INFO success: worker-0 entered RUNNING state, process has stayed up for > than 1 seconds
2026-11-29 21:41:54,079 WARN exited: worker-0 (exit status 1; not expected)
"""


def log_of(run_dir: Path, pid: int) -> None:
    (run_dir / "log").mkdir(exist_ok=True)
    (run_dir / "log" / "supervisord.log").write_text(LOG.replace("pid 17", f"pid {pid}"))


def test_a_process_that_was_killed_is_explained_by_its_recording_and_the_supervisor(tmp_path: Path) -> None:
    worker = noted(tmp_path, "worker", dead=True)
    worker.beat("ready", 0, 0, 0.5)
    for step in range(50):
        worker.steps.add(Kind.STEP, a=step)
    noted(tmp_path, "api")  # lives
    noted(tmp_path, "tokenizer", dead=True).life.add(Kind.ENDED)
    log_of(tmp_path, DEAD_PID)
    (found,) = crashes(tmp_path)
    assert found.process == "worker-0" and found.how.startswith("terminated by SIGKILL: kill -9,")
    assert [event.a for event in found.events if event.kind is Kind.STEP] == list(range(40, 50))
    assert found.afterwards == [
        "2026-11-29 21:40:54,079 WARN exited: worker-0 (terminated by SIGKILL; not expected)",
        "2026-11-29 21:40:54,126 INFO spawned: 'worker-0' with pid 3487",
    ]


def test_an_exception_is_told_with_its_stack(tmp_path: Path) -> None:
    worker = noted(tmp_path, "worker", dead=True)
    peer = recordings(tmp_path)[0].peer
    folder = tmp_path / crash.FOLDER
    folder.mkdir()
    for step in range(200):
        worker.steps.add(Kind.STEP, a=step)
    error = RuntimeError("the device has gone")
    crash.Reporter(folder / file_name(peer, "json"), peer, "f00d", worker).write(error)
    (folder / file_name(peer, "txt")).touch()
    (found,) = crashes(tmp_path)
    assert found.how == "RuntimeError: the device has gone" and found.raised[0].type == "RuntimeError"
    assert len(found.events) == 11 and found.events[-1].a == 199
    assert found.afterwards == []  # no log is left


def test_a_native_fault_is_told_by_its_text(tmp_path: Path) -> None:
    noted(tmp_path, "scheduler", dead=True)
    folder = tmp_path / crash.FOLDER
    folder.mkdir()
    (folder / file_name(recordings(tmp_path)[0].peer, "txt")).write_text("Fatal Python error: Aborted\n\nThread 1\n")
    (folder / "other.txt").write_text("not ours")
    (found,) = crashes(tmp_path)
    assert found.how == "Aborted" and found.native.endswith("Thread 1")


def test_a_text_that_goes_after_it_was_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted(tmp_path, "scheduler", dead=True)
    folder = tmp_path / crash.FOLDER
    folder.mkdir()
    text = folder / file_name(recordings(tmp_path)[0].peer, "txt")
    text.write_text("Fatal Python error: Aborted\n")
    os.utime(text, (7.0, 7.0))
    stat = Path.stat

    def gone(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path == text:
            raise FileNotFoundError(path)
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", gone)
    assert [(each.how, each.at_s) for each in crashes(tmp_path)] == [("Aborted", 7.0)]


def test_the_newest_comes_first_and_one_process_can_be_asked_for(tmp_path: Path) -> None:
    for service in ("worker", "scheduler"):
        noted(tmp_path, service, dead=True).beat("ready", 0, 0, 0.5)  # type: ignore[arg-type]
    assert [each.process for each in crashes(tmp_path)] == ["scheduler-0", "worker-0"]
    for name in ("worker", "worker-0"):
        told, others = ask(tmp_path, name, crashed=True)
        assert told.process == "worker-0" and others == []  # type: ignore[union-attr]
    assert [each.process for each in ask(tmp_path, "", crashed=True)[1]] == ["worker-0"]
    with pytest.raises(CommandError, match="no crash of api is recorded"):
        ask(tmp_path, "api", crashed=True)


def test_an_end_that_was_noted_is_no_kill(tmp_path: Path) -> None:
    own = noted(tmp_path, "api", dead=True)
    assert killed(recordings(tmp_path)[0])
    own.life.add(Kind.ENDED)
    assert not killed(recordings(tmp_path)[0])


def test_what_the_supervisor_did_is_told_until_the_successor_starts() -> None:
    lines = LOG.splitlines()
    assert len(afterwards(lines, "worker-0", 17)) == 2
    assert afterwards(lines, "worker-0", 3487) == [lines[-1]]
    assert afterwards(lines, "worker-1", 18) == [] == afterwards(lines, "worker-0", 99)


def test_what_is_damaged_is_passed_over(tmp_path: Path) -> None:
    assert crashes(tmp_path) == []
    for folder in (crash.FOLDER, "record"):
        (tmp_path / folder).mkdir()
    (tmp_path / crash.FOLDER / "x.json").write_bytes(b"\xff\n{")
    (tmp_path / crash.FOLDER / "api-0.1.zzzzzzzz.txt").write_bytes(b"\xff")
    (tmp_path / "record" / "x.ring").write_bytes(b"nothing")
    assert crashes(tmp_path) == []
