"""Scripts that read JSON from a text as it comes: values, strings, and the object that many dialects call a tool with.

Values are passed on as they stand, never written anew. Outside a string only characters of JSON are taken, so whatever
follows a value that is cut or wrong, such as a closing marker, is left where it is.
"""

import re
from collections.abc import Container

import msgspec

from common.dialects.scanner import Emit, Malformed, Scanner, Script

IN_STRING = re.compile(r'["\\]')
OUTSIDE = re.compile(r"[^\s,:\w+.\-]", re.ASCII)
END_OF_SCALAR = re.compile(r"[^\w+.\-]", re.ASCII)
CLOSERS = {"{": "}", "[": "]"}


def string(scanner: Scanner, emit: Emit) -> Script[bool]:
    """Emits a JSON string, its quotes included; False if the text ends inside. It must begin with its quote."""
    emit(scanner.take(1))
    while True:
        found = IN_STRING.search(scanner.buffer)
        if found and found[0] == '"':
            emit(scanner.take(found.end()))
            return True
        if found and len(scanner.buffer) > found.end():  # a backslash and what it escapes
            emit(scanner.take(found.end() + 1))
            continue
        if safe := found.start() if found and not scanner.ended else len(scanner.buffer):
            emit(scanner.take(safe))
        if scanner.ended:
            return False
        yield


def value(scanner: Scanner, emit: Emit) -> Script[bool]:
    """Emits one JSON value; False where it breaks off. Whitespace before it must have been taken."""
    yield from scanner.next_is('"')  # until there is a character
    if scanner.buffer[:1] == '"':
        return (yield from string(scanner, emit))
    if scanner.buffer[:1] not in CLOSERS:
        return (yield from _scalar(scanner, emit))
    open_brackets: list[str] = []
    while True:
        found = OUTSIDE.search(scanner.buffer)
        if found is None:
            if scanner.buffer:
                emit(scanner.take(len(scanner.buffer)))
            if scanner.ended:
                return False
            yield
            continue
        if found.start():
            emit(scanner.take(found.start()))
        letter = found[0]
        if letter == '"':
            if not (yield from string(scanner, emit)):
                return False
        elif letter in CLOSERS:
            open_brackets.append(CLOSERS[letter])
            emit(scanner.take(1))
        elif letter == open_brackets[-1]:
            emit(scanner.take(1))
            open_brackets.pop()
            if not open_brackets:
                return True
        else:
            return False


def _scalar(scanner: Scanner, emit: Emit) -> Script[bool]:
    some = False
    while True:
        found = END_OF_SCALAR.search(scanner.buffer)
        if count := found.start() if found else len(scanner.buffer):
            emit(scanner.take(count))
            some = True
        if found or scanner.ended:
            return some
        yield


def text_of(scanner: Scanner) -> Script[str]:
    """A JSON string, decoded. Raises Malformed."""
    parts: list[str] = []
    yield from scanner.next_is('"')
    if scanner.buffer[:1] != '"' or not (yield from string(scanner, parts.append)):
        raise Malformed
    return decoded("".join(parts))


def decoded(raw: str) -> str:
    """Raises Malformed if this is no JSON string."""
    try:
        return msgspec.json.decode(raw.encode(), type=str)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise Malformed from error


def call(
    scanner: Scanner, keys: tuple[str, ...] = ("arguments", "parameters"), known: Container[str] = ()
) -> Script[None]:
    """An object with `name`, one of `keys`, and perhaps `id`, in any order; commits it. Raises Malformed before that.

    `known`: names that count, if any are given. Arguments are streamed if the name comes first.
    """
    name = identity = early = ""
    yield from scanner.expect("{")
    while True:
        yield from scanner.spaces()
        if (yield from scanner.skip("}")):
            break
        key = yield from text_of(scanner)
        yield from scanner.spaces()
        yield from scanner.expect(":")
        yield from scanner.spaces()
        if key == "name":
            name = yield from text_of(scanner)
            if known and name not in known:
                raise Malformed
        elif key in keys and name:
            if (yield from _arguments(scanner, name, identity)):
                yield from _rest(scanner)
            return
        else:
            parts: list[str] = []
            if not (yield from value(scanner, parts.append)):
                raise Malformed
            if key in keys:
                early = "".join(parts)
            elif key == "id" and parts[0][0] == '"':
                identity = decoded("".join(parts))
        yield from scanner.spaces()
        yield from scanner.skip(",")
    arguments = object_of(early)
    scanner.call(name, identity)
    scanner.arguments(arguments)


def object_of(raw: str) -> str:
    """Arguments as they were written: an object, or one inside a string; none are an empty one. Raises Malformed."""
    if raw[:1] == '"':
        raw = decoded(raw)
    if raw[:1] == "{":
        return raw
    if raw in ("", "null"):
        return "{}"
    raise Malformed


def _arguments(scanner: Scanner, name: str, identity: str) -> Script[bool]:
    """False if they break off."""
    yield from scanner.next_is("{")
    if scanner.buffer[:1] == "{":
        scanner.call(name, identity)
        return (yield from value(scanner, scanner.arguments))
    parts: list[str] = []
    if not (yield from value(scanner, parts.append)):
        raise Malformed
    arguments = object_of("".join(parts))
    scanner.call(name, identity)
    scanner.arguments(arguments)
    return True


def _rest(scanner: Scanner) -> Script[None]:
    """What stands behind the arguments in the object of a call means nothing: other keys, and its end."""
    while True:
        yield from scanner.spaces()
        if not (yield from scanner.skip(",")):
            break
        yield from scanner.spaces()
        for _ in "key", "value":
            yield from value(scanner, _nowhere)
            yield from scanner.spaces()
            yield from scanner.skip(":")
            yield from scanner.spaces()
    yield from scanner.skip("}")


def _nowhere(_: str) -> None: ...
