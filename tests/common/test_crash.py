import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from common import crash, recorder
from common.protocol import Peer
from common.recorder import Kind, Recorder

SECRET = "marzipan"
PEER = Peer("api", 1, 0x99, "", 12, 50.0)


def run(code: str, run_dir: Path) -> "subprocess.CompletedProcess[str]":
    """A process that is armed, and then does `code`."""
    head = (
        "import os, resource, signal, sys, threading\nfrom pathlib import Path\nfrom common import crash\n"
        "from common.protocol import Peer\nfrom common.recorder import Kind\nrun_dir = Path(sys.argv[1])\n"
        "peer = Peer('worker', 3, 0xABCD1234, '', os.getpid(), 1000.5)\n"
    )
    arm = "" if "crash.arm" in code else "own = crash.arm(run_dir, peer, 'f00d')\n"
    command = [sys.executable, "-P", "-c", head + arm + code, str(run_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def report_of(run_dir: Path) -> crash.Report:
    (path,) = (run_dir / crash.FOLDER).glob("*.json")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    report = crash.read(path)
    assert report is not None
    return report


def test_an_exception_leaves_its_stack_and_the_last_events(tmp_path: Path) -> None:
    code = (
        "own.steps.add(Kind.STEP, a=8)\n"
        "def inner(prompt):\n    assert not prompt, 'step 8 has no rows'\n"
        f"def outer(prompt):\n    inner(prompt)\nouter('{SECRET}'[:])"
    )
    ended = run(code, tmp_path)
    assert ended.returncode == 1 and "AssertionError" in ended.stderr  # the log has it as ever
    report = report_of(tmp_path)
    assert (report.head.peer.service, report.head.peer.instance, report.head.fingerprint) == ("worker", 3, "f00d")
    assert [(raised.type, raised.text) for raised in report.raised] == [("AssertionError", "step 8 has no rows")]
    assert [frame.function for frame in report.raised[0].frames] == ["<module>", "outer", "inner"]
    assert [event.kind for event in report.events] == [Kind.STARTED, Kind.STEP, Kind.FAULT]
    (path,) = (tmp_path / crash.FOLDER).iterdir()  # and no empty file for native faults
    assert SECRET not in path.read_text()


@pytest.mark.parametrize("raised", ["KeyError(text)", "ValueError(text)", "text.encode().decode('utf-16')"])
def test_words_that_may_be_a_clients_stay_out(tmp_path: Path, raised: str) -> None:
    code = f"text = '{SECRET}!'\nprint(open)\n"
    expression = raised if "decode" in raised else f"(_ for _ in ()).throw({raised})"
    ended = run(code + f"eval({expression!r})", tmp_path)
    assert ended.returncode == 1
    report = report_of(tmp_path)
    assert report.raised[0].text == "" and report.raised[0].type.endswith("Error")
    assert SECRET.encode() not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_what_an_exception_came_from_is_told() -> None:
    def cause() -> BaseException:
        try:
            try:
                raise KeyError(SECRET)
            except KeyError as error:
                raise RuntimeError("no such row\nsecond line") from error
        except RuntimeError as error:
            return error

    found = list(crash.chain(cause()))
    assert [(raised.type, raised.text) for raised in found] == [("RuntimeError", "no such row"), ("KeyError", "")]
    assert found[0].frames[0].file == "tests/common/test_crash.py" and found[0].frames[0].line > 0
    loop = RuntimeError("a")
    loop.__cause__ = KeyError()
    loop.__cause__.__context__ = loop
    assert len(list(crash.chain(loop))) == 2


def test_a_fault_in_a_thread_is_reported(tmp_path: Path) -> None:
    code = "t = threading.Thread(target=lambda: 1 / 0, name='beacon')\nt.start()\nt.join()"
    run(code, tmp_path)
    report = report_of(tmp_path)
    assert report.head.thread == "beacon" and report.raised[0].type == "ZeroDivisionError"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE])
def test_native_faults_leave_the_stacks_of_all_threads(tmp_path: Path, number: int) -> None:
    ended = run(f"def deep():\n    os.kill(os.getpid(), {int(number)})\ndeep()", tmp_path)
    assert ended.returncode == -number
    (path,) = (tmp_path / crash.FOLDER).iterdir()
    text = path.read_text()
    assert path.suffix == ".txt" and text.startswith("Fatal Python error: ") and " in deep" in text


def test_an_end_in_order_leaves_nothing(tmp_path: Path) -> None:
    assert run("sys.exit(0)", tmp_path).returncode == 0
    assert list((tmp_path / crash.FOLDER).iterdir()) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_full_disk_costs_the_report_and_nothing_else(tmp_path: Path, when: str) -> None:
    """A limit on the size of files stands for it."""
    full = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    arm = "own = crash.arm(run_dir, peer, '')\n"
    ended = run((full + arm if when == "before" else arm + full) + "own.life.add(Kind.SIGNAL)\nassert 1 == 2", tmp_path)
    assert ended.returncode == 1 and ended.stderr.endswith("AssertionError\n")
    assert ("no flight recorder for this process: File too large" in ended.stderr) == (when == "before")
    rings = list((tmp_path / recorder.FOLDER).iterdir())
    assert len(rings) == (when == "after")
    if rings:  # its blocks were there already
        found = recorder.read(rings[0])
        assert found is not None and Kind.FAULT in [event.kind for event in found.rings["life"]]


def test_a_directory_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / crash.FOLDER).write_text("a file")
    ended = run("own.life.add(Kind.SIGNAL)\nassert 1 == 2", tmp_path)
    assert ended.returncode == 1 and ended.stderr.endswith("AssertionError\n")


def test_files_are_bounded_in_number_and_size(tmp_path: Path) -> None:
    folder = tmp_path / crash.FOLDER
    folder.mkdir()
    for start_s in range(1, 30):
        old = Peer("worker", 3, start_s, "", 1, float(start_s))
        for suffix in ("json", "txt"):
            (folder / recorder.file_name(old, suffix)).write_text("x")
    run("for i in range(100_000):\n    own.requests.add(Kind.FIRST_TEXT, i)\nassert 1 == 2", tmp_path)
    reports = sorted(folder.glob("*.json"))
    assert len(reports) == crash.REPORTS_KEPT + 1  # what was there at its start, and its own
    assert len(list(folder.glob("*.txt"))) <= crash.REPORTS_KEPT + 1
    assert 10_000 < reports[-1].stat().st_size < 200_000


def test_a_report_that_was_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    own, path = Recorder(), tmp_path / "x.json"
    own.life.add(Kind.STATE, text=b"ready")
    reporter = crash.Reporter(path, PEER, "f00d", own)
    reporter.write(RuntimeError("first"))
    reporter.write(RuntimeError("second"))  # is not written
    whole = path.read_bytes()
    report = crash.read(path)
    assert report is not None and report.raised[0].text == "first" and len(report.events) == 1
    assert all(msgspec.json.decode(line)["line"] for line in whole.splitlines())
    path.write_bytes(whole[:-20])
    cut = crash.read(path)
    assert cut is not None and cut.head == report.head and cut.events == []
    for content in (b"", b"nonsense", b"\xff", whole.split(b"\n", 1)[1]):
        path.write_bytes(content)
        assert crash.read(path) is None


def test_a_fault_in_a_callback_of_a_service_is_reported(tmp_path: Path) -> None:
    code = (
        "import asyncio\nfrom common.lifecycle import main\n"
        f"sys.argv[1:] = ['--set', f'links.run_dir={tmp_path}']\n"
        "async def serve(process):\n    asyncio.get_running_loop().call_soon(lambda: 1 / 0)\n"
        "    await process.stopping.wait()\nmain('api', serve)  # crash.arm"
    )
    assert run(code, tmp_path).returncode == 1
    report = report_of(tmp_path)
    assert report.raised[0].type == "ZeroDivisionError" and report.head.peer.service == "api"
