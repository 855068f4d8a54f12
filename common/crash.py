"""Reports of ends that were not meant: what raised, its stack without values, the last events. One file per process.

`arm` is called once at the start of a process, which then owns its files in `<run_dir>/crash`. A report is JSON lines:
a Head, one Raised per exception of the chain, the newest events. Faults in native code leave faulthandler's text
beside it. Texts of exceptions that may quote a request stay out. Nothing here fails a process: a full disk costs the
report, not more.
"""

import atexit
import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from common.errors import ConfigError
from common.protocol import Peer
from common.recorder import FOLDER as RECORD_FOLDER
from common.recorder import Event, Recorder, file_name, newest, open_file, prune

log = logging.getLogger("crash")
FOLDER = "crash"  # in the run directory
REPORTS_KEPT, RINGS_KEPT = 8, 3  # of each process
EVENTS_KEPT = 400
FRAMES_KEPT = 60
TEXT_CHARS = 300
# What we or the system raise with our own words. Others, like KeyError, may quote what a client has sent.
SPEAKING = (AssertionError, RuntimeError, MemoryError, OSError, ConfigError)


class Frame(msgspec.Struct, frozen=True):
    file: str
    line: int
    function: str
    code: str = ""


class Head(msgspec.Struct, frozen=True, tag="crash", tag_field="line"):
    peer: Peer
    at_s: float  # Unix time
    fingerprint: str
    thread: str = "MainThread"


class Raised(msgspec.Struct, frozen=True, tag="exception", tag_field="line"):
    """One exception; those that led to it come after it."""

    type: str
    text: str  # empty where it may quote a request
    frames: list[Frame]  # outermost first


class Happened(msgspec.Struct, frozen=True, tag="event", tag_field="line"):
    event: Event


Line = Head | Raised | Happened


class Report(msgspec.Struct):
    head: Head
    raised: list[Raised]
    events: list[Event]


class Reporter:
    """Writes at most one report."""

    def __init__(self, path: Path, peer: Peer, fingerprint: str, recorder: Recorder) -> None:
        self._path, self._peer, self._fingerprint, self._recorder = path, peer, fingerprint, recorder

    def write(self, error: BaseException) -> None:
        """The first fault is the one to know; what it leads to on the way out is not written."""
        head = Head(self._peer, time.time(), self._fingerprint, threading.current_thread().name)
        events = newest(self._recorder.read(), EVENTS_KEPT)
        lines: list[Line] = [head, *chain(error), *(Happened(event) for event in events)]
        content = msgspec.json.Encoder().encode_lines(lines)
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(content)


def chain(error: BaseException) -> Iterator[Raised]:
    """An exception and what it came from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < 8:
        seen.add(id(current))
        text = str(current).partition("\n")[0][:TEXT_CHARS] if isinstance(current, SPEAKING) else ""
        yield Raised(type(current).__name__, text, _frames(current.__traceback__))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _frames(stack: TracebackType | None) -> list[Frame]:
    found = traceback.extract_tb(stack)[-FRAMES_KEPT:]
    return [Frame(_short(each.filename), each.lineno or 0, each.name, each.line or "") for each in found]


def _short(file: str) -> str:
    """Without what is only this host's: from the package's folder on."""
    return file.rpartition("site-packages/")[2].removeprefix(str(Path(__file__).parents[1]) + "/")


def arm(run_dir: Path, peer: Peer, fingerprint: str) -> Recorder:
    """The process's recorder; whatever ends the process from now on leaves what can be left."""
    folder, name = run_dir / FOLDER, f"{peer.service}-{peer.instance}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        recorder = open_file(run_dir, peer, fingerprint)
    except OSError as error:
        log.warning("no flight recorder for this process: %s in %s", error.strerror, run_dir)
        recorder = Recorder()
    prune(run_dir / RECORD_FOLDER, f"{name}.*.ring", RINGS_KEPT)
    prune(folder, f"{name}.*.json", REPORTS_KEPT)
    prune(folder, f"{name}.*.txt", REPORTS_KEPT)
    recorder.on_fault = Reporter(folder / file_name(peer, "json"), peer, fingerprint, recorder).write
    _catch_exceptions(recorder)
    _catch_native_faults(folder / file_name(peer, "txt"))
    return recorder


def _catch_exceptions(recorder: Recorder) -> None:
    """Those that nobody has caught, in any thread."""
    before, before_in_thread = sys.excepthook, threading.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt):
            recorder.fault(error)
        before(kind, error, stack)

    def on_exception_in_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None:
            recorder.fault(arguments.exc_value)
        before_in_thread(arguments)

    sys.excepthook, threading.excepthook = on_exception, on_exception_in_thread


def _catch_native_faults(path: Path) -> None:
    """SIGSEGV, SIGABRT and their like leave the stacks of all threads. The file is empty until then."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return
    faulthandler.enable(descriptor, all_threads=True)
    atexit.register(_remove_empty, path, os.getpid())


def _remove_empty(path: Path, pid: int) -> None:
    with contextlib.suppress(OSError):
        if os.getpid() == pid and not path.stat().st_size:
            path.unlink()


def read(path: Path) -> Report | None:
    """A report, or None for a file that is none; one that was cut short gives what is whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    decoder = msgspec.json.Decoder(Line)
    lines: list[Line] = []
    for text in content.splitlines():
        try:
            lines.append(decoder.decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError):
            break
    if not lines or not isinstance(lines[0], Head):
        return None
    raised = [line for line in lines if isinstance(line, Raised)]
    return Report(lines[0], raised, [line.event for line in lines if isinstance(line, Happened)])
