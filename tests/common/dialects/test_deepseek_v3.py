from tests.common.dialects.reading import read

CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"


def test_markers_of_the_section_may_be_forgotten() -> None:
    assert read(CALL, "deepseek_v3").calls == [("f", "{}")]
    answer = read(f"<｜tool▁calls▁begin｜>{CALL}", "deepseek_v3")
    assert answer.calls == [("f", "{}")] and answer.content == ""


def test_what_is_no_call_is_text() -> None:
    for text in (
        "<｜tool▁calls▁begin｜>a",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f{}",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n[]\n```",
    ):
        assert read(text, "deepseek_v3") == (text, [], "")
