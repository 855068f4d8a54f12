"""Kernels are held against torch before they serve: each bound op at the model's shapes, in a child process.

Owner: the engine, at start; `valence doctor`. The child may die, hang or be wrong: what it was doing then is dropped
for the next provider, and another child goes on behind it. Verdicts are kept by the content of everything that they
depend on, so that the next start tests nothing. Why so, and what it costs: docs/adr/0022.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil
import torch

from services.worker.aiter_cache import aiter_version, rocm_version
from services.worker.kernels import known_bad, registry
from services.worker.kernels.registry import Facts, Impl

log = logging.getLogger("worker")

PR_SET_PDEATHSIG = 1
AGAIN = 75  # sysexits.h EX_TEMPFAIL: the child asks for another one to go on
LOOK_S = 0.5  # how often signs of life are looked for
START_S = 300.0  # until the first: a child imports torch, and a busy node takes its time
COMMAND = (sys.executable, "-P", "-m", "services.worker.self_test_child")
LEAVE_S = 30.0  # a process that hangs in a driver may not even be killed: then it stays
TAIL = 300  # characters of what a child said before it died

Finder = Callable[[str], tuple[dict[str, Impl[Any]], str]]


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """About one op of one provider; without an op about the import of the provider. No reason: it is good."""

    op: str
    provider: str
    reason: str = ""
    cases: int = 0


class Begun(msgspec.Struct, frozen=True, tag=True):
    """From the child: what it does next; without a provider, something of its own."""

    op: str
    provider: str
    case: str


class Job(msgspec.Struct, frozen=True):
    """What a child is to try. `device` as torch writes it; `dtype` without "torch."."""

    priority: tuple[str, ...]
    device: str
    arch: str
    dtype: str
    shapes: dict[str, int]
    captures: bool = False
    verdicts: tuple[Verdict, ...] = ()  # what is known already

    def facts(self) -> Facts:
        return Facts(self.device.partition(":")[0], self.arch, getattr(torch, self.dtype), self.shapes)


def finder_without(facts: Facts, verdicts: Iterable[Verdict], host: known_bad.Host | None = None) -> Finder:
    """Finds implementations like the registry, but those that failed, or are known to be bad, refuse with the reason.

    A provider that cannot be imported safely is not imported.
    """
    host = host or versions()
    failed = {(v.op, v.provider): v.reason for v in verdicts if v.reason}
    found: dict[str, tuple[dict[str, Impl[Any]], str]] = {}

    def find(provider: str) -> tuple[dict[str, Impl[Any]], str]:
        if provider not in found:
            if reason := failed.get(("", provider)):
                return {}, reason
            impls, reason = registry.find_for(facts, provider)
            found[provider] = {name: judged(impl) for name, impl in impls.items()}, reason
        return found[provider]

    def judged(impl: Impl[Any]) -> Impl[Any]:
        key = impl.op.name, impl.provider
        reason = known_bad.refusal(*key, facts, host) or failed.get(key)
        return impl if reason is None else replace(impl, refuses=lambda facts: reason)

    return find


def versions() -> known_bad.Host:
    """Of what the rules ask for."""
    return known_bad.Host(aiter_version(), rocm_version())


class NotTested(Exception):
    """No verdicts: the text says why."""


class SelfTest:
    """Runs children until every bound op has its verdict. `limit_s`: silence of a child that counts as a hang.

    A build may take minutes: changes in the folder `watched`, and the work of compilers, are signs of life too.
    """

    def __init__(self, limit_s: float, watched: Path | None = None, command: Sequence[str] = COMMAND) -> None:
        self._limit_s, self._watched, self._command = limit_s, watched, tuple(command)

    def __call__(self, job: Job, report: Callable[[str, int], None]) -> tuple[Verdict, ...]:
        """All verdicts, those of the job included. Raises NotTested.

        `report`: what is tried now, and how many have their verdict.
        """
        verdicts = list(job.verdicts)
        while True:
            told, begun, ended = self._child(msgspec.structs.replace(job, verdicts=tuple(verdicts)), verdicts, report)
            verdicts += told
            if ended in (0, AGAIN):
                if ended == 0:
                    return tuple(verdicts)
                assert told, "a child that wants to go on has said why"
                continue
            if begun is None:
                raise NotTested(f"the process that tests them {ended}")
            if any((v.op, v.provider) == (begun.op, begun.provider) for v in verdicts):
                raise NotTested(f"the process that tests them tries {begun.provider} {begun.op} again")
            what = f"{ended} in case {begun.case}" if begun.op else f"cannot be imported: it {ended}"
            verdicts.append(Verdict(begun.op, begun.provider, what))

    def _child(
        self, job: Job, before: Sequence[Verdict], report: Callable[[str, int], None]
    ) -> tuple[list[Verdict], Begun | None, int | str]:
        """Verdicts of one child, what it was at when it ended, and how: its status, or a sentence."""
        read, write = os.pipe()
        with os.fdopen(read, "rb", buffering=0) as lines, tempfile.TemporaryFile() as said:
            child = subprocess.Popen(
                [*self._command, str(write)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                pass_fds=(write,),
                start_new_session=True,
            )
            os.close(write)
            try:
                assert child.stdin is not None
                with suppress(BrokenPipeError), child.stdin as stream:
                    stream.write(msgspec.json.encode(job))
                told, begun, hangs = self._listen(child, lines, len(before), report)
                if hangs:
                    return told, begun, f"hangs: no sign of life for {self._limit_s:.0f} s"
                status = child.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # compilers that it started, too
                with suppress(subprocess.TimeoutExpired):
                    child.wait(LEAVE_S)
            return told, begun, status if status in (0, AGAIN) else how(status, tail(said))

    def _listen(
        self, child: "subprocess.Popen[bytes]", lines: IO[bytes], known: int, report: Callable[[str, int], None]
    ) -> tuple[list[Verdict], Begun | None, bool]:
        """Until the child closes its end or is dead (others may hold that end), or gives no sign of life."""
        told: list[Verdict] = []
        begun: Begun | None = None
        rest, alive_s, stamp = b"", time.monotonic(), self._stamp(child.pid)
        limit_s = max(self._limit_s, START_S)
        while True:
            if select.select([lines], [], [], min(LOOK_S, self._limit_s))[0]:
                piece = lines.read(65536)
                if not piece:
                    return told, begun, False
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    match msgspec.json.decode(line, type=Begun | Verdict):
                        case Begun(provider=""):
                            begun = None
                        case Begun() as begun:
                            report(f"{begun.provider} {begun.op or begun.case}", known + len(told))
                        case Verdict() as verdict:
                            told.append(verdict)
                            begun = None
                alive_s, limit_s = time.monotonic(), self._limit_s
            elif child.poll() is not None:
                return told, begun, False
            elif time.monotonic() - alive_s > limit_s:
                if (now := self._stamp(child.pid)) == stamp:
                    return told, begun, True
                alive_s, stamp = time.monotonic(), now

    def _stamp(self, pid: int) -> tuple[float, float]:
        """When something below the watched folder changed last, and how long processes of the child's have worked."""
        latest = 0.0
        for folder, _, names in os.walk(self._watched) if self._watched is not None else ():
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                with suppress(OSError):
                    latest = max(latest, os.stat(path).st_mtime)
        worked_s = 0.0
        with suppress(psutil.Error):
            for process in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.Error):
                    worked_s += sum(process.cpu_times()[:2])
        return latest, worked_s


def how(status: int, said: str) -> str:
    """How a child ended that should not have: `ends by SIGSEGV`."""
    if status < 0:
        with suppress(ValueError):
            return f"ends by {signal.Signals(-status).name}"
    return f"ends with status {status} ({said})" if said else f"ends with status {status}"


def tail(said: IO[bytes]) -> str:
    """The last line of a child's output that says something."""
    said.seek(0)
    lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][-TAIL:] if lines else ""


class Kept:
    """Verdicts of earlier starts: one file per content of what they depend on."""

    def __init__(self, folder: Path, key: str) -> None:
        self.path = folder / f"{key}.json"

    def load(self) -> tuple[Verdict, ...]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=tuple[Verdict, ...])
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read (%s): kernels are tested again", self.path, error)
            return ()

    def save(self, verdicts: Sequence[Verdict]) -> None:
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(verdicts))
            draft.replace(self.path)
        except OSError as error:
            log.warning("verdicts about kernels cannot be kept in %s: %s", self.path.parent, error.strerror)

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)


def tell(verdicts: Iterable[Verdict], known: bool) -> None:
    """A line of the log for each that failed."""
    for verdict in verdicts:
        if verdict.reason:
            what = f"{verdict.op} by {verdict.provider}" if verdict.op else f"provider {verdict.provider}"
            since = " (found at an earlier start; `valence doctor --again` tests anew)" if known else ""
            log.warning("dropped: %s: %s%s; the next provider takes its place", what, verdict.reason, since)


def wanted(setting: str, arch: str) -> bool:
    """`worker.self_test`: auto is on for AMD's GPUs, whose kernels are others' or have run nowhere else yet."""
    return setting == "on" or (setting == "auto" and arch.startswith("gfx"))
