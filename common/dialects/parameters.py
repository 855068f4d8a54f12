"""Scripts for parameters that a dialect writes as tagged text: `arguments` become one JSON object, piece by piece."""

from typing import NamedTuple

from common.dialects.scanner import Emit, Malformed, Scanner, Script
from common.dialects.tools import STRING, Tools, json_of, quoted


class Object:
    """The arguments of the call that was just committed, as a JSON object that grows."""

    def __init__(self, scanner: Scanner, tool: str, tools: Tools) -> None:
        self._scanner, self._tool, self._tools = scanner, tool, tools
        self._some = False

    def add(self, name: str, value: str) -> None:
        """`value` is JSON, or the beginning of it."""
        self._scanner.arguments(f"{', ' if self._some else '{'}{quoted(name)}: {value}")
        self._some = True

    def add_cut(self, name: str, value: str | None = None) -> None:
        """The text ended inside the name, or inside a value that is no string."""
        if not name and value is None:
            return
        before = f"{', ' if self._some else '{'}{quoted(name)[:-1]}"
        self._scanner.arguments(before if value is None else f'{before}": {value.lstrip()}')

    def end(self) -> None:
        self._scanner.arguments("}" if self._some else "{}")

    def read(self, name: str, end: str, types: frozenset[str] | None = None, newlines: bool = False) -> Script[bool]:
        """A value as text up to the marker `end`; False if that does not come. `newlines`: one at each end is format.

        `types`: what the text itself says of its type; None leaves it to the schema.
        """
        if types is None:
            types = self._tools.types(self._tool, name)
        parts: list[str] = []
        emit: Emit = parts.append
        if types == STRING:
            self.add(name, '"')
            emit = self._piece
        if newlines:
            yield from self._scanner.skip("\n")
            inner = OneNewline(emit)
            found = yield from self._scanner.until(inner.add, end)
            if not found:
                inner.end()
        else:
            found = yield from self._scanner.until(emit, end)
        if types != STRING and not found:
            self.add_cut(name, "".join(parts))
        elif types != STRING:
            self.add(name, json_of("".join(parts), types))
        elif found:
            self._scanner.arguments('"')
        return bool(found)

    def _piece(self, text: str) -> None:
        self._scanner.arguments(quoted(text)[1:-1])


class OneNewline:
    """Holds a newline at the end of a text until something follows it."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held = ""

    def add(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        if shown := text.removesuffix("\n"):
            self._emit(shown)

    def end(self) -> None:
        if self._held:
            self._emit(self._held)


class Tags(NamedTuple):
    """`<function=NAME> <parameter=KEY>VALUE</parameter> </function>`, in a dialect's own spelling."""

    call: str  # before the name
    call_name_end: str
    call_end: str
    parameter: str  # before the key
    parameter_name_end: str
    parameter_end: str
    newlines: bool = False


def tagged_call(scanner: Scanner, tags: Tags, tools: Tools) -> Script[None]:
    """One call, from its tag on; commits it once its name is known. Raises Malformed before that."""
    yield from scanner.expect(tags.call)
    written, _ = yield from scanner.collect(tags.call_name_end)
    name = written.strip().strip('"')
    scanner.call(name)
    arguments = Object(scanner, name, tools)
    while True:
        yield from scanner.spaces()
        found = yield from scanner.skip(tags.parameter, tags.call_end)
        if found != tags.parameter:
            break
        parts: list[str] = []
        named = yield from scanner.until(parts.append, tags.parameter_name_end)
        key, types = typed_key("".join(parts))
        if not named:
            arguments.add_cut(key)
            return
        if not (yield from arguments.read(key, tags.parameter_end, types, tags.newlines)):
            return
    if found or not scanner.ended:
        arguments.end()


def tagged_calls(scanner: Scanner, tags: Tags, tools: Tools) -> Script[None]:
    """One call or more. Raises Malformed if the first is none; from another one that is none on it is plain text."""
    yield from scanner.spaces()
    yield from tagged_call(scanner, tags, tools)
    while True:
        yield from scanner.spaces()
        if not (yield from scanner.next_is(tags.call)):
            return
        scanner.open("")
        try:
            yield from tagged_call(scanner, tags, tools)
        except Malformed:
            scanner.give_up()
            return


def typed_key(text: str) -> tuple[str, frozenset[str] | None]:
    """A parameter's name as its tag gives it: KEY, "KEY", or "KEY" string="true", which tells the type, too."""
    text = text.strip()
    if not text.startswith('"'):
        return text, None
    key, _, told = text[1:].partition('"')
    _, mark, word = told.partition('string="')
    return key, (STRING if word.startswith("true") else frozenset()) if mark else None
