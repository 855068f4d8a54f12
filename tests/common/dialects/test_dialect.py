from tests.common.dialects.reading import read


def test_content_around_calls_keeps_its_words() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert read(f"\n {call} \n", "hermes") == ("", [("f", "{}")], "")
    assert read(f" a \n{call}\n b {call} ", "hermes") == (" a\n b", [("f", "{}")] * 2, "")
    assert read(f"{call}</tool_call>", "hermes") == ("</tool_call>", [("f", "{}")], "")


def test_markers_of_a_section_without_calls_are_text() -> None:
    text = "a<｜tool▁calls▁begin｜>b<｜tool▁calls▁end｜>c"
    assert read(text, "deepseek_v31") == (text, [], "")
