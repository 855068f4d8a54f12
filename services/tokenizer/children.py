"""Processes for what clients or checkpoints may make endless, with limits on time and memory that hold.

Used by the encode pools' threads, through `Renderer` and `Checker`; each call has a child for itself, and a call that
finds none idle starts one. A child that did not answer in time, or died, is replaced at the next call, so that what
does not end costs each request its time limit and nobody else anything.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec

from common import env
from common.errors import Reject, RejectReason
from services.tokenizer.render_child import Refusal, Text, receive, send

WALL_FACTOR, WALL_EXTRA_S = 5.0, 10.0  # of a child's answer; the processor may be busy with others
START_S = 60.0
REPLY = msgspec.msgpack.Decoder(Text | Refusal)


def wait_s(cpu_s: float) -> float:
    """How long to wait for the answer of a child that may use `cpu_s` of the processor."""
    return cpu_s * WALL_FACTOR + WALL_EXTRA_S


class Died(Exception):
    """The child is gone, by itself or because it was killed here."""

    overran = False  # the kernel ended it for its processor time


class Child:
    """One process; used by one thread at a time."""

    def __init__(self, module: str) -> None:
        """Raises OSError if the system has no process or descriptor left."""
        self._sock, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a traceback could quote a prompt
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=env.bare_environment(),
            )
        except OSError:
            self._sock.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: msgspec.Struct, wait_s: float) -> Text | Refusal:
        """Raises Died if no answer comes."""
        try:
            self._sock.settimeout(wait_s)
            send(self._sock, message)
            content = receive(self._sock)
        except OSError as error:
            raise Died(str(error)) from None
        if not content:
            raise Died("it closed its socket")
        return REPLY.decode(content)

    @property
    def overran(self) -> bool:
        """Whether the kernel ended it for its processor time. Call after `kill`."""
        return self._process.returncode == -signal.SIGPROF

    def kill(self) -> None:
        """Ends it, if it has not ended; safe from any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)  # one that is dying by itself says why
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._sock.close()


class Children:
    """Those of one module. `what`: names it in refusals. `prepare`: asks a new one what comes first; its Died and
    Reject are those of the call that needed it.
    """

    def __init__(self, module: str, what: str, prepare: Callable[[Child], None] = lambda child: None) -> None:
        self._module, self._what, self._prepare = module, what, prepare
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self._closed = False

    def ask(self, message: msgspec.Struct, wait_s: float) -> Text | Refusal:
        """A child that somebody else killed is replaced once. Raises Died, and Reject if there can be no child."""
        try:
            return self._try(message, wait_s, fresh=False)
        except Died as died:
            if died.overran:
                raise
        return self._try(message, wait_s, fresh=True)

    def start(self) -> None:
        """One that waits for the first call. Raises as `ask`."""
        child = self._new()
        with self._lock:
            self._idle.append(child)

    def close(self) -> None:
        """Ends them; calls under way end with a Reject."""
        with self._lock:
            self._closed = True
            children = list(self._all)
            self._idle.clear()
        for child in children:
            self._drop(child)

    def pids(self) -> list[int]:
        with self._lock:
            return [child.pid for child in self._all]

    def _try(self, message: msgspec.Struct, wait_s: float, fresh: bool) -> Text | Refusal:
        with self._lock:
            child = self._idle.pop() if self._idle and not fresh else None
        child = child or self._new()
        with self._given_up(child):
            reply = child.ask(message, wait_s)
        with self._lock:
            self._idle.append(child)
        return reply

    def _new(self) -> Child:
        try:
            child = Child(self._module)
        except OSError as error:
            text = f"no process for {self._what} can be started: {error.strerror}; try again"
            raise Reject(RejectReason.UNAVAILABLE, text) from error
        with self._lock:
            self._all.add(child)
            closed = self._closed
        with self._given_up(child):
            if closed:
                raise Died("shutting down")
            self._prepare(child)
        return child

    @contextlib.contextmanager
    def _given_up(self, child: Child) -> Iterator[None]:
        """Without an answer from it."""
        try:
            yield
        except Reject:
            self._drop(child)
            raise
        except Died as died:
            self._drop(child)
            if self._closed:
                raise Reject(RejectReason.UNAVAILABLE, "the tokenizer is shutting down") from None
            died.overran = child.overran
            raise

    def _drop(self, child: Child) -> None:
        with self._lock:
            self._all.discard(child)
        child.close()
