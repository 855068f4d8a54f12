from tests.common.dialects.reading import objects, read

HEAD = "<tool_call>\n<function=get_weather>\n"
TAIL = "</function>\n</tool_call>"


def value(text: str, key: str) -> object:
    answer = read(f"{HEAD}<parameter={key}>\n{text}\n</parameter>\n{TAIL}", "qwen3_coder")
    ((_, arguments),) = objects(answer)
    return arguments[key]


def test_the_schema_tells_types() -> None:
    assert value("3", "city") == "3" and value("3", "days") == 3 and value("three", "days") == "three"
    assert value("[1, 2]", "places") == [1, 2] and value("['a']", "places") == ["a"]
    assert value("true", "detailed") is True and value("False", "detailed") is False
    assert value("null", "when") is None and value("7", "when") == "7"
    assert value('{"a": 1}', "unknown") == {"a": 1} and value("some words", "unknown") == "some words"


def test_one_newline_at_each_end_is_format() -> None:
    assert value("\n  if x:\n    <b>&amp;</b>\n", "city") == "\n  if x:\n    <b>&amp;</b>\n"
    assert value("", "city") == ""


def test_forgotten_ends() -> None:
    text = HEAD + "<parameter=days>\n3\n</parameter>\n</tool_call>"
    assert objects(read(text, "qwen3_coder")) == [("get_weather", {"days": 3})]


def test_what_is_no_call_is_text() -> None:
    for text in ("<tool_call>\n{}", "<tool_call><function=></function></tool_call>", "<function=f></function>"):
        assert read(text, "qwen3_coder") == (text, [], "")
