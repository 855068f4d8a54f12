from tests.common.dialects.reading import objects, read


def test_values_are_verbatim() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\na\n</parameter>\n</function>\n</tool_call>"
    assert objects(read(text, "mimo")) == [("get_weather", {"city": "\na\n"})]
