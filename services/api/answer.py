"""One choice beyond its plain text: token ids, and a chat as its client wants it, read by the model's dialects. Pure.

Owned by its Choice. Whatever the text is cut into, the events joined are the same; so a stream says what a whole reply
says, and a choice that goes on at another tokenizer goes on here as if nothing had happened.
"""

import secrets
import string
from array import array
from typing import NamedTuple

from common.columns import unpack_i32
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
    """`wanted` is None for what is no chat: its text is not read."""

    __slots__ = ("_reader", "_short_ids", "_wanted", "calls", "ids", "ids_taken", "prompt_taken", "told")

    def __init__(self, told: TextFormat, wanted: Wanted | None) -> None:
        dialects = Dialects(TOOLS.get(told.tools), REASONING.get(told.reasoning))
        self.told = told
        self._wanted = wanted or Wanted()
        reads = wanted is not None and bool(told.tools or told.reasoning)
        self._reader = Reader(dialects, self._wanted.tools, told.opened) if reads else None
        self._short_ids = dialects.tools is not None and dialects.tools.short_ids
        self.calls = 0  # that have begun
        self.ids: array[int] = array("i")  # tokens of the output, where they are wanted
        self.ids_taken = 0  # by the consumer
        self.prompt_taken = False  # the prompt's

    @property
    def reads(self) -> bool:
        return self._reader is not None

    def feed(self, text: str) -> list[Event]:
        assert self._reader is not None
        return self._shown(self._reader.feed(text)) if text else []

    def finish(self) -> list[Event]:
        """The end; repeating it is harmless."""
        assert self._reader is not None
        return self._shown(self._reader.finish())

    def add_ids(self, first: int, tokens: bytes) -> None:
        """Those of a row; a repeat's are here already."""
        if first == len(self.ids):
            self.ids.extend(unpack_i32(tokens))

    def take_ids(self) -> list[int]:
        """Those since the last call."""
        ids = self.ids[self.ids_taken :].tolist()
        self.ids_taken = len(self.ids)
        return ids

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
