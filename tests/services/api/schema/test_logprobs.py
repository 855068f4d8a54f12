"""The forms of replies, from reports of tokens that are parts of characters, equal, hidden or not there."""

from common.logprobs import Report
from common.protocol import PromptKind, Sampling, Submit
from services.api.logprobs import Entry, Form, Reported, TokenReport
from services.api.requests import Choice, Request
from services.api.schema.logprobs import (
    ContentLogprob,
    Writing,
    chat_logprobs,
    chosen,
    echoed,
    prompt_logprobs,
    text_logprobs,
    writing,
)

A, HALF, OTHER_HALF = Entry(1, b"a", -0.5), Entry(2, b"\xf0\x9f", -1.0), Entry(3, b"\xf0\x9f", -2.0)
REPORTS = [TokenReport(A, (A, HALF), 1, 0), TokenReport(HALF, (OTHER_HALF, A), 3, 1)]


def test_a_chat_has_bytes_where_a_token_is_no_text() -> None:
    first, second = chat_logprobs(REPORTS).content
    assert (first.token, first.logprob, first.bytes) == ("a", -0.5, [97])
    assert [(best.token, best.bytes) for best in first.top_logprobs] == [("a", [97]), ("�", [240, 159])]
    assert second.token == "�" and second.bytes == [240, 159]
    assert chat_logprobs(REPORTS, True).content[1].token == "token_id:2"


def test_tokens_that_write_a_part_of_an_answer() -> None:
    """A token that goes over its edge is one of them; a part of a character counts by its bytes."""
    pieces = [b"", b"<think>", b"a\n", b"</think>", b"\n\xf0\x9f", b"\x99\x82 a", b".<", b"<end>"]
    tokens = [ContentLogprob("", -float(place), list(piece), []) for place, piece in enumerate(pieces)]
    own, left = writing(tokens, "a")
    assert (own, left) == (tokens[2:3], tokens[3:])
    assert writing(left, "🙂 a.") == (tokens[4:7], tokens[7:])
    assert writing(tokens, "🙂 a\n") == (tokens, []) and writing([], "a") == ([], [])


def test_columns_keep_tokens_apart_that_look_alike() -> None:
    columns = text_logprobs(REPORTS, 10)
    assert columns.tokens == ["a", "bytes:\\xf0\\x9f"] and columns.token_logprobs == [-0.5, -1.0]
    assert columns.top_logprobs[0] == {"a": -0.5, "bytes:\\xf0\\x9f": -1.0}
    assert columns.top_logprobs[1] == {"bytes:\\xf0\\x9f": -1.0, "a": -0.5, "token_id:3": -2.0}
    assert [next(iter(each)) for each in columns.top_logprobs if each] == columns.tokens, (
        "the token itself is the first"
    )
    assert columns.text_offset == [10, 11]
    assert text_logprobs(REPORTS, as_ids=True).top_logprobs[1] == {
        "token_id:3": -2.0,
        "token_id:1": -0.5,
        "token_id:2": -1.0,
    }


def test_an_echo_begins_with_a_token_that_follows_nothing() -> None:
    parts = [TokenReport(Entry(7, piece, -1.0), (), 1, 0) for piece in (b"h", b"\xc3", b"\xa9", b"!")]
    told = echoed(b"<s>", parts, "hé!")
    assert told.tokens == ["<s>", "h", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert told.token_logprobs == [None, -1.0, -1.0, -1.0, -1.0] and told.top_logprobs[0] is None
    assert told.text_offset == [0, 0, 1, 1, 2], "what the tokenizer has put before the prompt has no place in it"
    assert echoed(b"h", parts[1:], "hé!").text_offset == [0, 1, 1, 2]


def test_a_prompt_in_vllm_s_form() -> None:
    first, one, two = prompt_logprobs(REPORTS, 1)
    assert first is None and one is not None and two is not None
    assert {key: (value.rank, value.decoded_token) for key, value in one.items()} == {"1": (1, "a")}
    assert {key: (value.rank, value.logprob) for key, value in two.items()} == {"3": (1, -2.0), "2": (3, -1.0)}


def test_the_best_choices_are_those_of_the_highest_mean() -> None:
    request, submit = Request(0.0, 0), Submit(0, PromptKind.TEXT, Sampling(4), n=3)
    for number in range(3):
        request.choices.append(Choice(request, number, 0, 9, submit))
    for choice, values in zip(request.choices, ((-3.0,), (-1.0, -1.0), (-2.0,)), strict=True):
        request.reports[choice.index] = reported = Reported(Report(0))
        reported.output += [TokenReport(Entry(1, b"a", value), (), 1, 0) for value in values]
    assert [choice.index for choice in chosen(request)] == [0, 1, 2]
    request.form = Form(best=2)
    assert [choice.index for choice in chosen(request)] == [1, 2], "two tokens are not less than one"


def test_tokens_of_a_text_that_grows() -> None:
    """Markers before it are left out; a token that writes the ends of two pieces comes with the first one."""

    def tokens(*pieces: bytes) -> list[ContentLogprob]:
        return [ContentLogprob("", -float(at), list(piece), []) for at, piece in enumerate(pieces)]

    known = tokens(b"</t>", b"\n", b"t", b"o d", b"\xf0\x9f", b"\x99\x82", b"</s>")
    growing = Writing()
    assert growing.more(known[:3], "t") == known[2:3]
    assert growing.more(known[:4], "o ") == known[3:4]
    assert growing.more(known[:6], "d🙂") == known[4:6]
    assert growing.more(known, "") == []
    whole = Writing()
    assert whole.more(known, "to d🙂") == known[2:6] == writing(known, "to d🙂")[0]
    assert Writing().more(known, "?") == []
