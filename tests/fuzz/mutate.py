"""Random values of a type, and changes to bytes and trees. All of it follows from the `Random` that is given."""

import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from random import Random
from typing import Any

import msgspec

Special = Mapping[str, Callable[[], Any]]
EDGES = (0, 1, -1, 2, 3, 255, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, 2**63, -(2**63), 2**64 - 1)
REALS = (0.0, 1.0, -1.0, 0.5, 1e300, -1e300, float("nan"), float("inf"))
TEXTS = ("", "a", "\0", "../../etc/passwd", "é" * 9, "x" * 300, "ipc:///nowhere", "tcp://127.0.0.1:1", "<|im_end|>")


def value(random: Random, kind: Any, special: Special | None = None) -> Any:
    """A value that msgspec would accept for a field of this type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return random.choice(arguments)
    if origin in (typing.Union, types.UnionType):
        return value(random, random.choice(arguments), special)
    if origin is tuple and Ellipsis not in arguments:
        return tuple(value(random, each, special) for each in arguments)
    if origin in (list, tuple):
        return [value(random, arguments[0], special) for _ in range(random.choice((0, 1, 3, 40)))]
    if origin is dict:
        return {value(random, arguments[0]): value(random, arguments[1]) for _ in range(random.choice((0, 1, 5)))}
    return _plain(random, kind, special)


def _plain(random: Random, kind: Any, special: Special | None) -> Any:
    if kind is bool:
        return random.random() < 0.5
    if kind is int:
        return random.choice(EDGES) if random.random() < 0.5 else random.randint(0, 300)
    if kind is float:
        return random.choice(REALS)
    if kind is str:
        return random.choice(TEXTS)
    if kind is bytes:
        return random.randbytes(random.choice((0, 1, 3, 4, 8, 16, 400)))
    if kind is type(None):
        return None
    if issubclass(kind, Enum):
        return random.choice(list(kind))
    return message(random, kind, special)


def message(random: Random, kind: type[msgspec.Struct], special: Special | None = None) -> msgspec.Struct:
    """A struct with any values that its types allow; later fields often keep their defaults.

    `special` gives values that mean something for fields of some names, mostly taken.
    """
    hints = typing.get_type_hints(kind)
    special = special or {}
    values = {}
    for field in msgspec.structs.fields(kind):
        if field.name in special and random.random() < 0.8:
            values[field.name] = special[field.name]()
        elif field.required or random.random() < 0.5:
            values[field.name] = value(random, hints[field.name], special)
    return kind(**values)


def frame(random: Random, good: bytes) -> bytes:
    """Some bytes of a frame, or its length, are changed."""
    spoilt = bytearray(good)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        place = random.randrange(len(spoilt)) if spoilt else 0
        match random.randrange(7):
            case 0 if spoilt:
                spoilt[place] ^= 1 << random.randrange(8)
            case 1 if spoilt:
                spoilt[place] = random.choice((0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC6, 0xC9, 0xCF, 0xDB, 0xDD, 0xFF))
            case 2:
                del spoilt[place:]
            case 3:
                spoilt += random.randbytes(random.randrange(1, 40))
            case 4:
                spoilt[place:place] = random.randbytes(random.randrange(1, 5))
            case 5:
                del spoilt[place : place + random.randrange(1, 9)]
            case 6:
                spoilt[place : place + 4] = (2**32 - 1).to_bytes(4, "big")
    return bytes(spoilt)


def tree(random: Random, good: Any, depth: int = 0) -> Any:
    """A copy of lists, objects and plain values in which one place is another value."""
    if isinstance(good, list) and good and random.random() < 0.85:
        copy = list(good)
        place = random.randrange(len(copy))
        copy[place] = tree(random, copy[place], depth + 1)
        return copy
    if isinstance(good, dict) and good and random.random() < 0.85:
        key = random.choice(list(good))
        return good | {key: tree(random, good[key], depth + 1)}
    return random.choice((_odd, _odd, _edge, _nested))(random)


def _odd(random: Random) -> Any:
    return random.choice((None, True, "", "x", [], {}, [[]], {"a": None}, -1, 0, 1.5, *TEXTS))


def _edge(random: Random) -> Any:
    return random.choice(EDGES)


def _nested(random: Random) -> Any:
    nested: Any = 1
    for _ in range(random.choice((3, 60))):
        nested = [nested] if random.random() < 0.5 else {"a": nested}
    return nested


BOMBS = (
    b"\x91" * 100_000,  # arrays in arrays
    b"\x81\xa1a" * 50_000,  # maps in maps
    b"\xdd\xff\xff\xff\xff",  # an array of four thousand million entries
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",  # as many bytes
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x00",  # an extension as large
    b"\xc7\x00\x01",
    b"\x92\xa5Abort\xdd\xff\xff\xff\xff",
    b"\x92\xa5Abort\xc1",
    b"\x98\xa5Admit\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xc6\xff\xff\xff\xff",
    b"\x95\xa9Heartbeat\xa5ready\x01\xc0\xdf\xff\xff\xff\xff",
)
