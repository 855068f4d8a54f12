import socket
import threading

import msgspec

from common.protocol import Grammar
from services.tokenizer.grammar_child import Check, answer, serve
from services.tokenizer.render_child import Refusal, Text, receive, send


def check(kind: str, text: str) -> Check:
    return Check(Grammar(kind, text, "field"), 1.0)  # type: ignore[arg-type]


def test_answers() -> None:
    assert answer(check("regex", "a+")) == Text("")
    refusal = answer(check("regex", "("))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.param) == ("invalid", "field") and "unclosed group" in refusal.message


def test_serves_until_the_other_side_closes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def ask() -> None:
            send(ours, check("choice", '["a"]'))
            replies.append(msgspec.msgpack.decode(receive(ours), type=Text | Refusal))
            ours.shutdown(socket.SHUT_RDWR)

        replies: list[Text | Refusal] = []
        client = threading.Thread(target=ask)
        client.start()
        serve(theirs)
        client.join()
    assert replies == [Text("")]
