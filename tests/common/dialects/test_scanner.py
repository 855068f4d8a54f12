import pytest

from common.dialects.events import Content
from common.dialects.scanner import MAX_HEAD, Malformed, Scanner, Script


def run(script: Script[object], scanner: Scanner, text: str) -> object:
    """What the script returns for a text that comes letter by letter."""
    for letter in [*text, None]:
        scanner.ended |= letter is None
        scanner.buffer += letter or ""
        try:
            next(script)
        except StopIteration as end:
            return end.value
    raise AssertionError("it waits after the end")


@pytest.mark.parametrize(
    ("text", "shown", "marker", "rest"),
    [("ab<x>c", "ab", "<x>", ""), ("a<<xyz", "a<<xyz", "", ""), ("<y><x>", "", "<y>", ""), ("a<x", "a<x", "", "")],
)
def test_until(text: str, shown: str, marker: str, rest: str) -> None:
    scanner, parts = Scanner(), list[str]()
    assert run(scanner.until(parts.append, "<x>", "<y>"), scanner, text) == marker
    assert "".join(parts) == shown and scanner.buffer == rest and scanner.read == len(shown + marker)


def test_what_may_become_a_marker_is_held() -> None:
    scanner, parts = Scanner(), list[str]()
    script = scanner.until(parts.append, "<tool>")
    scanner.buffer = "a<to"
    next(script)
    assert parts == ["a"] and scanner.buffer == "<to"


def test_literals_and_spaces() -> None:
    scanner = Scanner()
    assert run(scanner.next_is("abc", "xyz"), scanner, "abd") == ""
    scanner = Scanner()
    assert run(scanner.skip("abc", "xyz"), scanner, "xyz") == "xyz" and scanner.buffer == ""
    scanner = Scanner()
    assert run(scanner.spaces(), scanner, " \n x") == " \n " and scanner.buffer == "x"
    scanner = Scanner()
    with pytest.raises(Malformed):
        run(scanner.expect("abc"), scanner, "abd")
    scanner = Scanner()
    with pytest.raises(Malformed):
        run(scanner.collect("<x>"), scanner, "abd")


def test_giving_a_call_up_puts_the_text_back() -> None:
    scanner = Scanner()
    scanner.buffer = "<x>abc"
    scanner.open(scanner.take(3))
    scanner.take(2)
    scanner.give_up()
    assert scanner.buffer == "abc" and scanner.read == 3 and scanner.events == [Content("<x>")]
    scanner.give_up()
    assert scanner.events == [Content("<x>")]


def test_a_head_has_a_length() -> None:
    scanner = Scanner()
    scanner.open("<x>")
    scanner.buffer = "a" * (MAX_HEAD + 1)
    assert not scanner.too_long
    scanner.take(MAX_HEAD + 1)
    with pytest.raises(Malformed):
        scanner.call("f")
    scanner.buffer = "a" * 100
    assert scanner.too_long


def test_a_marker_is_put_back() -> None:
    scanner = Scanner()
    scanner.buffer = "ab"
    scanner.open("")
    scanner.take(2)
    scanner.untake("ab")
    assert scanner.buffer == "ab" and scanner.read == 0
