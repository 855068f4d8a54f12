import resource
import socket
import subprocess
import sys

import pytest

from common.errors import RejectReason
from services.tokenizer.chat import ChatTemplate
from services.tokenizer.render_child import Refusal, Render, Setup, Text, answer, receive, send

MESSAGES = b'[{"role": "user", "content": "hi"}]'


def test_a_setup_and_a_prompt() -> None:
    template, reply = answer(None, Setup("{{ messages[0].content }}!", {}, "", 1.0))
    assert isinstance(template, ChatTemplate)
    assert reply == Text("")
    assert answer(template, Render(MESSAGES, b"", True, 100)) == (template, Text("hi!"))


def test_refusals_are_messages() -> None:
    template, reply = answer(None, Setup("{% for %}", {}, "", 1.0))
    assert template is None
    assert isinstance(reply, Refusal) and reply.reason == RejectReason.INVALID
    template, _ = answer(None, Setup("{{ messages[0].content }}", {}, "", 1.0))
    assert answer(template, Render(MESSAGES, b"", True, 1))[1] == Refusal(
        "too_long", "the rendered messages are longer than 1 characters", "messages"
    )


def test_messages_of_any_size_arrive_whole_and_an_end_is_empty() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sizes = [0, 1, 1000, 100_000]
        for size in sizes:
            ours.settimeout(10)
            send(ours, Text("x" * size))
            assert receive(theirs).endswith(b"x" * size)
        ours.sendall(b"\xff\0\0\0half")
        ours.close()
        assert receive(theirs) == b""


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_CORE", "RLIMIT_NOFILE", "RLIMIT_AS"])
def test_the_process_is_confined(limit: str) -> None:
    code = (
        "import resource; from services.tokenizer.render_child import confine; confine(); "
        f"print(resource.getrlimit(resource.{limit})[1])"
    )
    found = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert 0 <= found < (4 << 30)
    assert found != resource.RLIM_INFINITY
