import pytest

from tests.common.dialects.reading import objects, read


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'a, b)'", "a, b)"),
        (r"""'it\'s'""", "it's"),
        (r"""'\\'""", "\\"),
        ("[1, (2, 3), {'x': None}]", [1, [2, 3], {"x": None}]),
        ("True", True),
        ("false", False),
        ("-1.5", -1.5),
        ("some words", "some words"),
    ],
)
def test_values(written: str, value: object) -> None:
    answer = read(f"[get_weather(city={written}, days = 3)]", "pythonic")
    assert objects(answer) == [("get_weather", {"city": value, "days": 3})] and answer.content == ""


@pytest.mark.parametrize("text", ["[1, 2]", "[unknown(a=1)]", "[get_weather", "[]", " [", "get_weather(city='a')"])
def test_other_lists_are_an_answer(text: str) -> None:
    assert read(text, "pythonic") == (text, [], "")


def test_markers_of_llama_4() -> None:
    answer = read("<|python_start|>[time.now()]<|python_end|>\nSo.", "pythonic")
    assert objects(answer) == [("time.now", {})] and answer.content == "So."
