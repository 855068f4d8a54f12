# ruff: noqa: PT017 (what an error says is part of the case)
"""Chat templates that misbehave, and templates made of their pieces: each renders or is a Reject that can be sent.

What spends time or memory without output (`hostile_templates.UNBOUNDED`) is not for this process.
"""

import json
import re
from collections.abc import Callable
from random import Random

import msgspec

from common.errors import Reject, RejectReason
from common.protocol import Refused
from services.tokenizer.chat import ChatTemplate
from tests.fuzz.files import bounded
from tests.fuzz.hostile_templates import BOUNDED, REFUSED

MAX_CHARS = 100_000
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES: tuple[object, ...] = (
    [{"role": "user", "content": "hi"}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "user", "content": "{{ 1/0 }}{% for %}"}],
    [{"role": "\0", "content": "\u2028", "__class__": "x"}],
    [{}],
    [],
    {},
    7,
)
PIECES = re.compile(r"(\{%.*?%\}|\{\{.*?\}\})", re.DOTALL)
SLOW = re.compile(r"range\(|\* *\d{4}|\*\*|recursive|macro|lipsum|\{\{ f\(\)")


def render(source: str, messages: object = MESSAGES[0], kwargs: object = None) -> str:
    """The prompt. Raises Reject, which is checked to be one that a client can be told."""
    try:
        with bounded():
            template = ChatTemplate(source, SPECIALS)
            encoded = b"" if kwargs is None else json.dumps(kwargs).encode()
            return template.render(json.dumps(messages).encode(), encoded, True, MAX_CHARS)
    except Reject as reject:
        assert reject.reason in (RejectReason.INVALID, RejectReason.TOO_LONG)
        assert reject.param in ("messages", "chat_template_kwargs")
        assert msgspec.msgpack.encode(Refused(1, reject.reason, reject.message, reject.param))
        raise


def mixed(random: Random) -> str:
    """Pieces of hostile templates, of which none takes long by itself."""
    sources = [source for source in (REFUSED | BOUNDED).values() if len(source) < 1000]
    pieces = [piece for source in sources for piece in PIECES.split(source) if piece and not SLOW.search(piece)]
    return "".join(random.choices(pieces, k=random.choice((1, 2, 4, 9))))


def fuzz(budget: int, first: int, advance: Callable[[], None]) -> None:
    """`budget` mixed templates."""
    random = Random(first)
    for _ in range(budget):
        source, messages = mixed(random), random.choice(MESSAGES)
        kwargs = random.choice(
            (None, {}, {"enable": [1]}, {"messages": 1}, {"bos_token": None, "loop": 1, "range": 2}, [])
        )
        try:
            render(source, messages, kwargs)
        except Reject:
            pass
        except Exception as error:
            error.add_note(f"{source!r} with {messages!r} and {kwargs!r}")
            raise
        advance()
