"""Text that comes in pieces, for scripts that read it as if it were all there. Pure; one Scanner per choice.

A script is a generator that yields whenever it must see more and never yields after the end. Its decisions depend on
the text alone, not on how it is cut, so events joined are the same for any cut, and reading a text again gives the same
state. A call is committed by `call`; a script that fails before that (Malformed) leaves its opening marker and what
followed as plain text. Whitespace around calls and reasoning belongs to the format and is left out.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

from common.dialects.events import Arguments, CallBegun, Content, Event, Reasoning

T = TypeVar("T")
Script = Generator[None, None, T]
Emit = Callable[[str], None]
MAX_HEAD = 16 * 1024  # characters from an opening marker to the commit; a longer head is no call
LOOKAHEAD = 64  # more than any script looks beyond what it has taken


class Malformed(Exception):
    """This is no call after all."""


class Channel:
    """Reasoning or content: holds whitespace at its end until something follows it."""

    __slots__ = ("_events", "_kind", "begun", "held", "trim")

    def __init__(self, events: list[Event], kind: type[Content] | type[Reasoning]) -> None:
        self._events, self._kind = events, kind
        self.begun = False
        self.trim = False  # whitespace before the first word is dropped
        self.held = ""

    def add(self, text: str) -> None:
        text = self.held + text
        if self.trim and not self.begun:
            text = text.lstrip()
        shown = text.rstrip()
        self.held = text[len(shown) :]
        if shown:
            self.begun = True
            self._events.append(self._kind(shown))

    def end(self) -> None:
        """Nothing follows: what was held is part of the text."""
        if self.held and not (self.trim and not self.begun):
            self._events.append(self._kind(self.held))
        self.held = ""


class Scanner:
    """Owned by its Reader, used by one script. `buffer` is the text that has come and is not taken yet."""

    __slots__ = (
        *("_call", "_opening", "_taken", "_taken_chars", "buffer", "content", "ended", "events", "read", "reasoning"),
        "spans",
    )

    def __init__(self) -> None:
        self.buffer = ""
        self.ended = False
        self.events: list[Event] = []
        self.read = 0  # characters taken
        self.spans: list[tuple[int, int]] = []  # of the text: reasoning with its markers; the last may be open (-1)
        self.content = Channel(self.events, Content)
        self.reasoning = Channel(self.events, Reasoning)
        self.reasoning.trim = True
        self._call = -1  # index of the newest call
        self._opening = ""  # marker of the call that is not committed yet
        self._taken: list[str] | None = None  # what was taken behind it
        self._taken_chars = 0

    # -- calls

    def open(self, marker: str) -> None:
        """What follows may be a call; `marker` was taken just now."""
        self._opening, self._taken, self._taken_chars = marker, [], 0

    @property
    def too_long(self) -> bool:
        """Whether the head of a call has grown beyond what any call has."""
        return self._taken is not None and self._taken_chars + len(self.buffer) > MAX_HEAD + LOOKAHEAD

    def call(self, name: str, identity: str = "") -> None:
        """Commits the call. Raises Malformed without a name, or after too long a head."""
        if not name or (self._taken is not None and self._taken_chars > MAX_HEAD):
            raise Malformed
        self._taken = None
        self._call += 1
        self.content.held, self.content.trim = "", True
        self.events.append(CallBegun(self._call, name, identity))

    def arguments(self, text: str) -> None:
        if text:
            self.events.append(Arguments(self._call, text))

    def give_up(self) -> None:
        """No call: the marker is content, and what follows it is read again as any text. Nothing after a commit."""
        if self._taken is not None:
            self.content.add(self._opening)
            self.buffer = "".join(self._taken) + self.buffer
            self.read -= self._taken_chars
            self._taken = None

    def accept(self) -> None:
        """No call, but what was read behind the marker is what it should be, and is not text."""
        self._taken = None

    @property
    def calls(self) -> int:
        return self._call + 1

    # -- reasoning

    def begin_reasoning(self, back: int = 0) -> None:
        """`back`: how many characters of its marker were taken already."""
        self.spans.append((self.read - back, -1))

    def end_reasoning(self) -> None:
        self.spans[-1] = (self.spans[-1][0], self.read)
        self.reasoning.held = ""
        self.content.trim = True

    def settle(self) -> None:
        """Nothing more comes for the channels as they are: what they hold is text, unless it stands behind a call."""
        if not self.calls or self.content.held.strip():
            self.content.end()
        self.content.held = ""
        self.reasoning.end()

    # -- taking text

    def take(self, count: int) -> str:
        text, self.buffer = self.buffer[:count], self.buffer[count:]
        self.read += count
        if self._taken is not None:
            self._taken.append(text)
            self._taken_chars += count
        return text

    def untake(self, marker: str) -> None:
        """Puts back a marker that was taken just now."""
        self.buffer = marker + self.buffer
        self.read -= len(marker)
        if self._taken is not None:
            self._taken.pop()
            self._taken_chars -= len(marker)

    def until(self, emit: Emit, *markers: str) -> Script[str]:
        """Emits what comes before the first of these markers and returns the marker, taken; "" at the end of the text.

        No marker may begin inside another one.
        """
        while True:
            at, found = len(self.buffer), ""
            for marker in markers:
                place = self.buffer.find(marker)
                if 0 <= place < at:
                    at, found = place, marker
            if found or self.ended:
                if at:
                    emit(self.take(at))
                if found:
                    self.take(len(found))
                return found
            if safe := len(self.buffer) - _partial(self.buffer, markers):
                emit(self.take(safe))
            yield

    def collect(self, *markers: str) -> Script[tuple[str, str]]:
        """The text before the first of these markers, and the marker, taken. Raises Malformed if none comes."""
        parts: list[str] = []
        marker = yield from self.until(parts.append, *markers)
        if not marker:
            raise Malformed
        return "".join(parts), marker

    def spaces(self) -> Script[str]:
        """Takes whitespace; then the buffer begins with something else, or the text is over."""
        parts: list[str] = []
        while True:
            if count := len(self.buffer) - len(self.buffer.lstrip()):
                parts.append(self.take(count))
            if self.buffer or self.ended:
                return "".join(parts)
            yield

    def next_is(self, *literals: str) -> Script[str]:
        """The literal that comes next, not taken; "" if none does. No literal may begin with another one."""
        while True:
            for literal in literals:
                if self.buffer.startswith(literal):
                    return literal
            if self.ended or not any(literal.startswith(self.buffer) for literal in literals):
                return ""
            yield

    def skip(self, *literals: str) -> Script[str]:
        """Takes whichever of these comes next and returns it."""
        found = yield from self.next_is(*literals)
        if found:
            self.take(len(found))
        return found

    def expect(self, literal: str) -> Script[None]:
        """Raises Malformed if something else comes."""
        if not (yield from self.skip(literal)):
            raise Malformed


def _partial(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of the text that is the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest
