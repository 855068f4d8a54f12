from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.stop import StopMatcher

LETTERS = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


def run(stops: tuple[str, ...], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    shown = ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def expected(stops: tuple[str, ...], text: str, include: bool) -> tuple[str, str | None]:
    """By definition: the shortest beginning of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@given(STOPS, st.lists(LETTERS, max_size=8), st.booleans())
def test_any_chunking_gives_the_definition(stops: tuple[str, ...], pieces: list[str], include: bool) -> None:
    assert run(stops, pieces, include) == expected(stops, "".join(pieces), include)


@given(STOPS, st.lists(LETTERS, max_size=8))
def test_holds_back_only_what_could_become_a_stop_string(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher = StopMatcher(stops, False)
    shown = fed = ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown, fed = shown + text, fed + piece
        if stop is not None:
            return
        held = fed[len(shown) :]
        assert shown + held == fed
        candidates = [fed[i:] for i in range(len(fed)) if any(s.startswith(fed[i:]) for s in stops)]
        assert held == max(candidates, key=len, default="")


def test_split_over_three_pieces() -> None:
    matcher = StopMatcher(("<END>",), False)
    assert matcher.feed("one <") == ("one ", None)
    assert matcher.feed("EN") == ("", None)
    assert matcher.feed("D> two") == ("", "<END>")


def test_text_that_was_held_for_nothing_is_shown_later() -> None:
    matcher = StopMatcher(("<END>",), False)
    assert matcher.feed("a <EN") == ("a ", None)
    assert matcher.feed("Q") == ("<ENQ", None)
    assert matcher.feed("<") == ("", None)
    assert matcher.flush() == "<"


def test_ties_go_by_the_order_of_the_list() -> None:
    assert run(("bc", "abc"), ["abc"]) == ("a", "bc")
    assert run(("abc", "bc"), ["abc"]) == ("", "abc")


def test_included_stop_string_ends_the_text() -> None:
    assert run(("STOP",), ["go ST", "OP on"], include=True) == ("go STOP", "STOP")


def test_unarmed_match_does_not_count_but_its_beginning_does() -> None:
    matcher = StopMatcher(("ab",), False)
    assert matcher.feed("ab", armed=False) == ("ab", None)
    assert matcher.feed("xa", armed=False) == ("x", None)
    assert matcher.feed("b", armed=True) == ("", "ab")


def test_match_of_the_unarmed_time_never_fires_later() -> None:
    matcher = StopMatcher(("xabz", "ab"), False)
    assert matcher.feed("xab", armed=False) == ("", None)
    assert matcher.feed("q", armed=True) == ("xabq", None)


def test_empty_stop_strings_are_ignored() -> None:
    assert run(("", "b"), ["ab"]) == ("a", "b")
