"""`python -m services.tokenizer.render_child FD`: renders chat templates in a process that may be killed.

A checkpoint's template is a program. The sandbox bounds what it can reach, but neither its time nor its memory: one
multiplication can take hours without returning to the interpreter. So it runs here, where the kernel ends it. Serves
one Renderer over a socket; ends when that closes. Writes to nothing else.
"""

import contextlib
import resource
import signal
import socket
import struct
import sys

import msgspec

from common.errors import Reject
from services.tokenizer.chat import ChatTemplate

LENGTH = struct.Struct("<I")
MEMORY_BYTES = 512 << 20  # beyond what the process has at its start
OPEN_FILES = 16


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message: what to compile, and the limit on the processor time of each message."""

    source: str
    special_tokens: dict[str, str]
    tool_source: str
    cpu_s: float


class Render(msgspec.Struct, frozen=True, tag=True):
    messages: bytes
    template_kwargs: bytes
    add_generation_prompt: bool
    max_chars: int


class Text(msgspec.Struct, frozen=True, tag=True):
    """The prompt; empty after a Setup."""

    text: str


class Refusal(msgspec.Struct, frozen=True, tag=True):
    reason: str
    message: str
    param: str | None


ASKED = msgspec.msgpack.Decoder(Setup | Render)


def receive(sock: socket.socket) -> bytearray:
    """One message; empty when the other side has closed."""
    head = _exactly(sock, LENGTH.size)
    return _exactly(sock, LENGTH.unpack(head)[0]) if head else head


def _exactly(sock: socket.socket, size: int) -> bytearray:
    received = bytearray(size)
    view, at = memoryview(received), 0
    while at < size:
        count = sock.recv_into(view[at:])
        if not count:
            return bytearray()
        at += count
    return received


def send(sock: socket.socket, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    sock.sendall(LENGTH.pack(len(body)) + body)


def confine() -> None:
    """From here on: no new files, no writing of files, no core dumps, bounded memory."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as statm:
            limit = int(statm.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for limit, value in (
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def answer(template: ChatTemplate | None, asked: Setup | Render) -> tuple[ChatTemplate | None, Text | Refusal]:
    """The template from now on, and the reply."""
    try:
        if isinstance(asked, Setup):
            return ChatTemplate(asked.source, asked.special_tokens, asked.tool_source), Text("")
        assert template is not None, "a Setup comes first"
        text = template.render(asked.messages, asked.template_kwargs, asked.add_generation_prompt, asked.max_chars)
        return template, Text(text)
    except Reject as reject:
        return template, Refusal(reject.reason, reject.message, reject.param)


def serve(sock: socket.socket) -> None:
    """Until the other side closes. The kernel ends this process where a message takes too long."""
    template: ChatTemplate | None = None
    cpu_s = 0.0
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while content := receive(sock):
        asked = ASKED.decode(content)
        if isinstance(asked, Setup):
            cpu_s = asked.cpu_s
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        template, reply = answer(template, asked)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(sock, reply)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as own, contextlib.suppress(ConnectionError):
        confine()
        serve(own)
