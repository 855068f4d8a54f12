"""`python -m services.tokenizer.grammar_child FD`: checks grammars in a process that may be killed.

A client's grammar may take any time to prepare: two thousand times `.*` take seconds, ten thousand minutes, without
returning to the interpreter. So it is tried here, where the kernel ends it. Serves one Checker over a socket; ends when
that closes. Writes to nothing else.
"""

import contextlib
import signal
import socket
import sys

import msgspec

from common import grammar
from common.errors import Reject
from common.protocol import Grammar
from services.tokenizer.render_child import Refusal, Text, confine, receive, send


class Check(msgspec.Struct, frozen=True, tag=True):
    """`cpu_s`: processor time that it may take."""

    grammar: Grammar
    cpu_s: float


ASKED = msgspec.msgpack.Decoder(Check)


def answer(asked: Check) -> Text | Refusal:
    """An empty Text if the grammar can be used."""
    try:
        grammar.check(asked.grammar)
    except Reject as reject:
        return Refusal(reject.reason, reject.message, reject.param)
    return Text("")


def serve(sock: socket.socket) -> None:
    """Until the other side closes. The kernel ends this process where a grammar takes too long."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while content := receive(sock):
        asked = ASKED.decode(content)
        signal.setitimer(signal.ITIMER_PROF, asked.cpu_s)
        reply = answer(asked)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(sock, reply)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as own, contextlib.suppress(ConnectionError):
        confine()
        serve(own)
