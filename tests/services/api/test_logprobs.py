from array import array

import pytest

from common.columns import pack_i32
from common.logprobs import Report, TextLogprobs
from services.api.logprobs import LEAST, Entry, Reported


def told(first: int, tokens: str, top: int = 1, lead: bytes = b"") -> TextLogprobs:
    records, pieces = b"", []
    for token in tokens:
        others = [-1] * top  # the vocabulary is that small
        records += pack_i32([2, ord(token), *others]) + array("f", [-0.5, *[float("-inf")] * top]).tobytes()
        pieces += [token.encode(), *[b""] * top]
    return TextLogprobs(first, records, pieces, pack_i32(range(first, first + len(tokens))), lead)


def test_each_is_taken_once_and_repeats_are_left_out() -> None:
    reported = Reported(Report(1))
    assert reported.add(told(0, "ab")) and reported.add(told(1, "bc"))
    assert [report.own for report in reported.take()] == [Entry(ord(letter), letter.encode(), -0.5) for letter in "abc"]
    assert not reported.take() and reported.begun
    assert reported.add(told(0, "abc")) and not reported.take()
    assert reported.add(told(3, "d"))
    (last,) = reported.take()
    assert (last.rank, last.offset, last.best) == (2, 3, ())


def test_a_prompt_is_left_to_ask_for_until_there_is_output() -> None:
    reported = Reported(Report(1, 0))
    assert reported.add_prompt(told(1, "ab", 0, b"x")) and reported.left() == Report(1, 0)
    assert reported.add_prompt(told(1, "abc", 0, b"x")) and reported.add_prompt(told(4, "d", 0))
    assert [chr(report.own.token) for report in reported.prompt] == list("abcd") and reported.lead == b"x"
    reported.add(told(0, "y"))
    assert reported.left() == Report(1)
    named = Reported(Report(1, 0, named=(7,)))
    named.add(told(0, "y"))
    assert named.left() == Report(1, named=(7,))


@pytest.mark.parametrize(
    "wrong",
    [
        told(1, "a"),
        told(-1, "a"),
        told(0, "a", 2),
        TextLogprobs(0, b"abc", []),
        TextLogprobs(0, told(0, "a").records, [b"a"]),
        TextLogprobs(0, told(0, "a").records, [b"a", b"b"], b"12"),
    ],
)
def test_nonsense_is_no_report(wrong: TextLogprobs) -> None:
    reported = Reported(Report(1))
    assert not reported.add(wrong) and not reported.output
    assert not Reported(Report()).add(told(0, "a", 0))


def test_json_has_no_infinity() -> None:
    reported = Reported(Report(1))
    records = pack_i32([1, 5, 6]) + array("f", [float("nan"), float("-inf")]).tobytes()
    assert reported.add(TextLogprobs(0, records, [b"a", b"b"], pack_i32([0])))
    (report,) = reported.take()
    assert report.own.logprob == report.best[0].logprob == LEAST
