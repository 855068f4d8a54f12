from common.dialects.events import CallBegun
from tests.common.dialects.reading import EXAMPLES, events_of, read, reader_of


def test_the_models_own_ids() -> None:
    begun = [each for each in events_of(reader_of("kimi_k2"), [EXAMPLES["kimi_k2"]]) if isinstance(each, CallBegun)]
    assert [call.identity for call in begun] == ["functions.get_weather:0", "functions.time.now:1"]


def test_calls_end_reasoning() -> None:
    calls = EXAMPLES["kimi_k2"].removeprefix("Let me see.")
    answer = read("<think>Hm. " + calls, "kimi_k2", "kimi_k2")
    assert answer.reasoning == "Hm." and len(answer.calls) == 2
    text = "<|tool_calls_section_begin|>b"
    assert read("<think>a" + text, "kimi_k2", "kimi_k2") == (text, [], "a")
    assert read("<think>a</think>b", "", "kimi_k2") == ("b", [], "a")


def test_an_id_without_a_name() -> None:
    text = "<|tool_call_begin|> a b<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert read(text, "kimi_k2") == (text, [], "")
