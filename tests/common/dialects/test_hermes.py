import pytest

from tests.common.dialects.reading import objects, read


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "get_weather", "arguments": {"city": "a</tool_call>b"}}', {"city": "a</tool_call>b"}),
        ('{"arguments": {"days": 1}, "name": "get_weather"}', {"days": 1}),
        ('{"name": "get_weather", "parameters": {"days": [1, {"x": -2.5e3}]}}', {"days": [1, {"x": -2500.0}]}),
        ('{"name": "get_weather", "arguments": "{\\"days\\": 1}"}', {"days": 1}),
        ('{"name": "get_weather", "arguments": null}', {}),
        ('{"name": "get_weather"}', {}),
        ('{"id": 5, "name": "get_weather", "arguments": {}, "type": "function"}', {}),
        ('{"name": "get_weather", "arguments": {"days": 1}}}', {"days": 1}),
        ('{"name":"get_weather","arguments":{}}', {}),
    ],
)
def test_forms_of_a_call(body: str, arguments: object) -> None:
    answer = read(f"<tool_call>\n{body}\n</tool_call>", "hermes")
    assert objects(answer) == [("get_weather", arguments)] and answer.content == ""


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>get_weather</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        '<tool_call>{"nam": "f"}</tool_call>',
        "<tool_call></tool_call>",
        "a <tool_call> b </tool_call> c <tool",
        '<tool_call>{name: "f"}',
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert read(text, "hermes") == (text, [], "")


def test_a_forgotten_end_and_words_between() -> None:
    text = 'One <tool_call>{"name": "f", "arguments": {}} <tool_call>{"name": "g"}</tool_call>\n and two.\n'
    answer = read(text, "hermes")
    assert answer.calls == [("f", "{}"), ("g", "{}")] and answer.content == "One\n and two."


def test_arguments_that_break_off_stay_as_they_are() -> None:
    answer = read('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> on', "hermes")
    assert answer.calls == [("f", '{"a": 1')] and answer.content == "on"
    assert read('<tool_call>{"name": "f", "arguments": {"a": ]}</tool_call>', "hermes").calls == [("f", '{"a": ')]


def test_a_false_start_before_a_call() -> None:
    answer = read('<tool_call>\n<tool_call>\n{"name": "f"}\n</tool_call>', "hermes")
    assert answer.content == "<tool_call>" and answer.calls == [("f", "{}")]
