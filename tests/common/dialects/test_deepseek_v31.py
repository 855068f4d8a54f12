from tests.common.dialects.reading import read


def test_words_between_calls() -> None:
    call = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    answer = read(f"<｜tool▁calls▁begin｜>{call}and{call}<｜tool▁calls▁end｜>\n", "deepseek_v31")
    assert answer.calls == [("f", "{}")] * 2 and answer.content == "and"
