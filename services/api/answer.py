"""One choice of a chat as its client gets it: its text read by the model's dialects, less what was not asked for. Pure.

Owned by its Choice. Whatever the text is cut into, the events joined are the same; so a stream says what a whole reply
says, and a choice that goes on at another tokenizer goes on here as if nothing had happened.
"""

import secrets
import string
from typing import NamedTuple

from common.dialects.events import Arguments, CallBegun, Event, Reasoning
from common.dialects.registry import REASONING, TOOLS, Dialects, Reader
from common.dialects.tools import Tools
from common.protocol import TextFormat

ALPHABET = string.ascii_letters + string.digits


class Wanted(NamedTuple):
    """What a chat asks for."""

    tools: Tools | None = None  # calls of these are looked for
    reasoning: bool = True  # is shown
    parallel: bool = True  # more than one call


class Answer:
    __slots__ = ("_reader", "_short_ids", "_wanted", "calls")

    def __init__(self, told: TextFormat, wanted: Wanted) -> None:
        dialects = Dialects(TOOLS.get(told.tools), REASONING.get(told.reasoning))
        self._reader = Reader(dialects, wanted.tools, told.opened)
        self._short_ids = dialects.tools is not None and dialects.tools.short_ids
        self._wanted = wanted
        self.calls = 0  # that have begun

    def feed(self, text: str) -> list[Event]:
        return self._shown(self._reader.feed(text)) if text else []

    def finish(self) -> list[Event]:
        """The end; repeating it is harmless."""
        return self._shown(self._reader.finish())

    def _shown(self, events: list[Event]) -> list[Event]:
        shown: list[Event] = []
        for event in events:
            if isinstance(event, CallBegun | Arguments):
                if event.call and not self._wanted.parallel:
                    continue
                if isinstance(event, CallBegun):
                    self.calls += 1
                    event = event._replace(identity=event.identity or self._new_id())
            elif isinstance(event, Reasoning) and not self._wanted.reasoning:
                continue
            shown.append(event)
        return shown

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(ALPHABET) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"
