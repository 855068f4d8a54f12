import logging
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from common.errors import Reject, RejectReason
from services.api.schema.parse import Body, anything, one_of


class Inner(msgspec.Struct):
    word: str


class Outer(msgspec.Struct, kw_only=True):
    needed: int
    size: Annotated[float, Meta(ge=0, le=2)] | None = None
    inner: list[Inner] = []
    bias: dict[int, Annotated[float, Meta(le=100)]] = {}
    extra: dict[str, Any] | None = None


BODY = Body(Outer, {"logprobs": one_of(False, 0), "hint": anything})


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        (b"", None, "not valid JSON"),
        (b"{", None, "not valid JSON"),
        (b'{"needed": 1} x', None, "not valid JSON"),
        (b'{"needed": NaN}', None, "not valid JSON"),
        (b'{"needed": Infinity}', None, "not valid JSON"),
        (b'{"needed": 1, "x": "\xff"}', None, "not UTF-8 at byte 20"),
        (b'{"needed": 1, "extra": {"a": "\\ud800"}}', None, "not valid JSON"),
        (b'{"needed": 1, "x": ' + b"[" * 100_000, None, "nested too deeply"),
        (b'{"needed": 1, "extra": {"a": ' + b"[" * 100_000, None, "nested too deeply"),
        (b"[]", None, "Expected `object`, got `array`"),
        (b"null", None, "Expected `object`, got `null`"),
        (b"{}", "needed", "needed is required"),
        (b'{"needed": "1"}', "needed", "needed: Expected `int`, got `str`"),
        (b'{"needed": true}', "needed", "got `bool`"),
        (b'{"needed": 1, "size": 3}', "size", "<= 2.0"),
        (b'{"needed": 1, "size": -1}', "size", ">= 0.0"),
        (b'{"needed": 1, "size": 1e999}', "size", "out of range"),
        (b'{"needed": 1, "size": ' + b"9" * 400 + b"}", "size", "out of range"),
        (b'{"needed": 1, "inner": [{"word": "a"}, {"word": 5}]}', "inner[1].word", "got `int`"),
        (b'{"needed": 1, "inner": [{"word": "a"}, {}]}', "inner[1]", "required field `word`"),
        (b'{"needed": 1, "bias": {"x": 1}}', "bias", "Expected `int`"),
        (b'{"needed": 1, "bias": {"5": 101}}', "bias", "<= 100.0"),
        (b'{"needed": 1, "logprobs": true}', "logprobs", "logprobs is not supported"),
        (b'{"needed": 1, "logprobs": 1}', "logprobs", "logprobs is not supported"),
    ],
)
def test_a_bad_body_is_refused_by_field(body: bytes, param: str | None, text: str) -> None:
    with pytest.raises(Reject) as caught:
        BODY.parse(body)
    assert caught.value.reason is RejectReason.INVALID
    assert caught.value.param == param and text in caught.value.message


@pytest.mark.parametrize("extra", ["null", "false", "0"])
def test_harmless_values_of_unsupported_fields_pass(extra: str) -> None:
    assert BODY.parse(f'{{"needed": 1, "logprobs": {extra}, "hint": {{"a": [1]}}}}'.encode()) == Outer(needed=1)


def test_unknown_fields_are_accepted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    body = Body(Outer)
    with caplog.at_level(logging.WARNING, "api"):
        for _ in range(3):
            assert body.parse(b'{"needed": 1, "surprise": {"x": 1}}') == Outer(needed=1)
    assert [record.message for record in caplog.records] == ["unknown field 'surprise' of Outer is ignored"]


def test_names_that_are_remembered_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    body = Body(Outer)
    names = ", ".join(f'"u{i}": 0' for i in range(1000))
    body.parse(f'{{"needed": 1, {names}}}'.encode())
    assert len(caplog.records) == 256


@pytest.mark.parametrize(
    ("values", "good", "bad"),
    [
        ((1,), [None, 1], [True, 2, "1", [1]]),
        ((False,), [None, False], [0, True]),
        (([],), [None, []], [[1], {}]),
        (({},), [None, {}], [{"a": 1}, []]),
        ((), [None], [0, False, "", []]),
    ],
)
def test_one_of(values: tuple[Any, ...], good: list[Any], bad: list[Any]) -> None:
    harmless = one_of(*values)
    assert all(map(harmless, good)) and not any(map(harmless, bad))
