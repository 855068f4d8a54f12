import pytest

from tests.common.dialects.reading import objects, read


def test_with_and_without_lines() -> None:
    """GLM 4.5 and GLM 4.7."""
    flat = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a\n</arg_value></tool_call>"
    assert objects(read(flat, "glm")) == [("get_weather", {"city": "a\n"})]
    assert objects(read("<tool_call>get_weather</tool_call>", "glm")) == [("get_weather", {})]


@pytest.mark.parametrize(
    "text", ["<tool_call>", "<tool_call>a b</tool_call>", "<tool_call>f {}</tool_call>", "<tool_call><x>"]
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert read(text, "glm") == (text, [], "")
