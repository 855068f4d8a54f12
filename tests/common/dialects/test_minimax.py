from tests.common.dialects.reading import objects, read

CALL = '<invoke name="get_weather">\n<parameter name="days">3</parameter>\n</invoke>\n'


def test_calls_count_only_inside_a_block() -> None:
    assert read(CALL, "minimax") == (CALL, [], "")
    text = f"<minimax:tool_call>\n{CALL}{CALL}</minimax:tool_call>\nDone."
    answer = read(text, "minimax")
    assert objects(answer) == [("get_weather", {"days": 3})] * 2 and answer.content == "Done."


def test_a_bad_second_call_is_text() -> None:
    answer = read(f"<minimax:tool_call>{CALL}<invoke name=></invoke></minimax:tool_call>", "minimax")
    assert len(answer.calls) == 1 and answer.content == "<invoke name=></invoke>"
