import pytest

from common.dialects.events import Arguments
from common.dialects.parameters import Object, OneNewline, typed_key
from common.dialects.scanner import Scanner
from common.dialects.tools import STRING
from tests.common.dialects.reading import ASKED


@pytest.mark.parametrize(
    ("tag", "key", "types"),
    [
        ("a", "a", None),
        (' "a b" ', "a b", None),
        ('"a" string="true"', "a", STRING),
        ('"a" string="false"', "a", frozenset()),
        ('"a" str', "a", None),
    ],
)
def test_keys(tag: str, key: str, types: frozenset[str] | None) -> None:
    assert typed_key(tag) == (key, types)


def test_an_object_grows() -> None:
    scanner = Scanner()
    scanner.call("get_weather")
    grown = Object(scanner, "get_weather", ASKED)
    grown.add("a", "1")
    grown.add('b"', "[]")
    grown.add_cut("c")
    pieces = [event.text for event in scanner.events if isinstance(event, Arguments)]
    assert "".join(pieces) == '{"a": 1, "b\\"": [], "c'
    empty = Scanner()
    empty.call("f")
    Object(empty, "f", ASKED).add_cut("")
    Object(empty, "f", ASKED).end()
    assert empty.events[1:] == [Arguments(0, "{}")]


def test_one_newline_is_held() -> None:
    parts: list[str] = []
    inner = OneNewline(parts.append)
    for piece in ("a\n", "\n", "b\n"):
        inner.add(piece)
    assert "".join(parts) == "a\n\nb"
    inner.end()
    assert "".join(parts) == "a\n\nb\n"
