from common.dialects.events import CallBegun
from common.dialects.registry import TOOLS
from tests.common.dialects.reading import events_of, objects, read, reader_of


def test_the_list_of_older_models() -> None:
    calls = '{"name": "get_weather", "arguments": {"days": 1}, "id": "abc"}, {"name": "time.now", "arguments": {}}'
    answer = read(f"[TOOL_CALLS] [{calls}]", "mistral")
    assert objects(answer) == [("get_weather", {"days": 1}), ("time.now", {})] and answer.content == ""
    assert read('[TOOL_CALLS]{"name": "f", "arguments": {}}', "mistral").calls == [("f", "{}")]
    assert read('[TOOL_CALLS][{"name": "f"}, {"x": 1}]', "mistral") == ('{"x": 1}]', [("f", "{}")], "")


def test_ids() -> None:
    events = events_of(reader_of("mistral"), ["[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}"])
    assert events[0] == CallBegun(0, "f", "123456789")
    assert TOOLS["mistral"].short_ids
    assert read("[TOOL_CALLS]f{}", "mistral").calls == [("f", "{}")]  # of a tokenizer without these markers


def test_what_is_no_call_is_text() -> None:
    for text in ("[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS]f[ARGS]x", "[TOOL_CALLS][1]", "[ARGS]"):
        assert read(text, "mistral") == (text, [], "")
