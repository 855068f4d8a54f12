"""Chat templates in processes of their own (render_child.py), with limits on time and memory that hold.

Used by the encode pools' threads; each call has a child for itself, and a call that finds none idle starts one. Owns
the children. A child that did not answer in time, or died, is replaced at the next call, so that a template which does
not end costs each request its time limit and nobody else anything.
"""

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading

import msgspec

from common import env
from common.errors import Reject, RejectReason
from services.tokenizer.chat import PARAM
from services.tokenizer.render_child import Refusal, Render, Setup, Text, receive, send

log = logging.getLogger("tokenizer")
WALL_FACTOR, WALL_EXTRA_S = 5.0, 10.0  # of a child's answer; the processor may be busy with others
START_S = 60.0
REPLY = msgspec.msgpack.Decoder(Text | Refusal)


class Died(Exception):
    """The child is gone, by itself or because it was killed here."""

    overran = False  # the kernel ended it for its processor time


class Child:
    """One process; used by one thread at a time."""

    def __init__(self, module: str = "services.tokenizer.render_child") -> None:
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


class Renderer:
    """A chat template as `ChatTemplate` is one. `cpu_s`: processor time that one prompt may take."""

    def __init__(self, source: str, special_tokens: dict[str, str], tool_source: str = "", cpu_s: float = 2.0) -> None:
        """Compiles the template. Raises Reject (INVALID) if that fails or takes too much."""
        self._setup = Setup(source, special_tokens, tool_source, cpu_s)
        self._wait_s = cpu_s * WALL_FACTOR + WALL_EXTRA_S
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._children: set[Child] = set()
        self._closed = False
        self._idle.append(self._start())

    def render(self, messages: bytes, template_kwargs: bytes, add_generation_prompt: bool, max_chars: int) -> str:
        """As ChatTemplate.render. Raises Reject, also when the template takes too much time or memory."""
        asked = Render(messages, template_kwargs, add_generation_prompt, max_chars)
        try:
            reply = self._ask(asked)
        except Died as died:
            if died.overran or self._closed:
                raise self._told(died) from None
            try:
                reply = self._ask(asked, fresh=True)  # somebody else may have killed it
            except Died as again:
                raise self._told(again) from None
        if isinstance(reply, Refusal):
            raise Reject(RejectReason(reply.reason), reply.message, reply.param)
        return reply.text

    def _ask(self, asked: Render, fresh: bool = False) -> Text | Refusal:
        """One try, with a child that is idle or new. Raises Died when the child is gone for good."""
        with self._lock:
            child = self._idle.pop() if self._idle and not fresh else None
        if child is None:
            child = self._start()
        try:
            reply = child.ask(asked, self._wait_s)
        except Died as died:
            self._drop(child)
            died.overran = child.overran
            raise
        with self._lock:
            self._idle.append(child)
        return reply

    def close(self) -> None:
        """Ends the children; calls under way end with a Reject."""
        with self._lock:
            self._closed = True
            children = list(self._children)
            self._idle.clear()
        for child in children:
            self._drop(child)

    def _start(self) -> Child:
        try:
            child = Child()
        except OSError as error:
            text = f"no process for the chat template can be started: {error.strerror}; try again"
            raise Reject(RejectReason.UNAVAILABLE, text) from error
        with self._lock:
            self._children.add(child)
            closed = self._closed
        if closed:
            self._drop(child)
            raise Reject(RejectReason.UNAVAILABLE, "the tokenizer is shutting down")
        try:
            reply = child.ask(self._setup, self._wait_s + START_S)
        except Died as died:
            self._drop(child)
            died.overran = child.overran
            if not died.overran and not self._closed:
                text = "the process for the chat template did not start; try again"
                raise Reject(RejectReason.UNAVAILABLE, text) from None
            raise self._told(died) from None
        if isinstance(reply, Refusal):
            self._drop(child)
            raise Reject(RejectReason(reply.reason), reply.message, reply.param)
        return child

    def _told(self, died: Died) -> Reject:
        """The refusal that tells why there is no answer."""
        if self._closed:
            return Reject(RejectReason.UNAVAILABLE, "the tokenizer is shutting down")
        if died.overran:
            what = f"took more than {self._setup.cpu_s:g} s of processor time"
        else:
            what = "did not end, or needed too much memory"
        log.warning("the model's chat template %s; its process was replaced", what)
        return Reject(RejectReason.INVALID, f"the model's chat template {what} on these messages", PARAM)

    def _drop(self, child: Child) -> None:
        with self._lock:
            self._children.discard(child)
        child.close()
