import pytest

from common.trace_context import Trace, parse, read, span_id_of, within

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{SPAN}-01"


def test_the_callers_context() -> None:
    assert parse(GIVEN, "a=1,b=2") == (Trace(TRACE, SPAN, "a=1,b=2"), True)
    assert parse(f"00-{TRACE}-{SPAN}-00") == (Trace(TRACE, SPAN), False)
    assert parse(f"cc-{TRACE}-{SPAN}-03-what-comes-later") == (Trace(TRACE, SPAN), True)  # a later version


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        GIVEN + "\n" + GIVEN,
    ],
)
def test_what_is_none_is_ignored(text: str) -> None:
    assert parse(text, "a=1") is None and read(text) is None


@pytest.mark.parametrize("state", ["a=\x00", "x" * 513, "ä"])
def test_a_state_that_is_none_is_left_out(state: str) -> None:
    assert parse(GIVEN, state) == (Trace(TRACE, SPAN), True)


def test_messages_carry_both() -> None:
    trace = Trace(TRACE, SPAN, "a=1, b=2")
    assert read(trace.text) == trace and trace.text == f"{GIVEN} a=1, b=2"
    assert read(within(trace.text, "1" * 16)) == trace.within("1" * 16)
    assert within("nonsense", "1" * 16) == ""


def test_each_sequence_of_each_scheduler_has_a_span_of_its_own() -> None:
    spans = {span_id_of(GIVEN, seq_id, seed) for seq_id in range(3) for seed in range(2)}
    assert len(spans) == 6 and all(len(each) == 16 for each in spans)
    assert span_id_of(GIVEN, 1, 1) == span_id_of(GIVEN, 1, 1)
