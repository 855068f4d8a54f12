import pytest

from tests.common.dialects.reading import objects, read


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "unknown", "parameters": {}}',
        '{"population": 3}',
        ' {"name": "get_weather"',
        '{"name": "Paris"}\n',
        'Look: {"name": "get_weather", "parameters": {}}',
        "<|python_tag|>print(1)",
        "{",
        " ",
    ],
)
def test_other_json_is_an_answer(text: str) -> None:
    assert read(text, "llama_json") == (text, [], "")


def test_with_the_tag_and_words_behind() -> None:
    answer = read('<|python_tag|>{"name": "time.now", "parameters": {}}; done', "llama_json")
    assert objects(answer) == [("time.now", {})] and answer.content == "; done"
    late = read('Well.<|python_tag|>{"name": "time.now", "parameters": {}}', "llama_json")
    assert objects(late) == [("time.now", {})] and late.content == "Well."
