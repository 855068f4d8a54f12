from common.dialects.registry import TOOLS
from tests.common.dialects.reading import EXAMPLES, objects, read

BAR = "｜DSML｜"


def test_a_parameter_tells_its_type() -> None:
    typed = f'<{BAR}parameter name="x" string="false">[1]</{BAR}parameter>'
    words = f'<{BAR}parameter name="days" string="true">1</{BAR}parameter>'
    bare = f'<{BAR}parameter name="city">1</{BAR}parameter>'
    call = f'<{BAR}invoke name="get_weather">{typed}{words}{bare}</{BAR}invoke>'
    text = f"<{BAR}function_calls>{call}</{BAR}function_calls>"
    assert objects(read(text, "deepseek_v32")) == [("get_weather", {"x": [1], "days": "1", "city": "1"})]


def test_blocks_of_v4_have_another_name() -> None:
    text = EXAMPLES["deepseek_v32"].replace("function_calls", "tool_calls")
    assert read(text, "deepseek_v32") == read(EXAMPLES["deepseek_v32"], "deepseek_v32")
    assert "deepseek_v4" in TOOLS["deepseek_v32"].model_types
