import pytest

from common.dialects.tools import ANY, STRING, Tools, json_of, python_value


def types(schema: object) -> frozenset[str]:
    function = {"name": "f", "parameters": {"properties": {"x": schema}}}
    return Tools([{"type": "function", "function": function}]).types("f", "x")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/x"}]}, set()),
        ({"$ref": "#/x"}, set()),
        (True, set()),
    ],
)
def test_types_of_a_schema(schema: object, expected: set[str]) -> None:
    assert types(schema) == expected


def test_odd_schemas_are_no_fault() -> None:
    for parameters in ({}, {"properties": []}, None, []):
        tools = Tools([{"function": {"name": "f", "parameters": parameters}}])
        assert "f" in tools and "g" not in tools and tools.types("f", "x") == ANY == tools.types("g", "x")


@pytest.mark.parametrize(
    ("text", "kinds", "expected"),
    [
        ("1", {"integer"}, "1"),
        ("1", {"number"}, "1"),
        ("1.5", {"integer"}, '"1.5"'),
        ("1", STRING, '"1"'),
        (" {'a': True} ", {"object"}, '{"a": true}'),
        ("nan", {"number"}, '"nan"'),
        ("1e999", {"number"}, '"1e999"'),
        ("[" * 5000, {"array"}, '"' + "[" * 5000 + '"'),
        ("x", ANY, '"x"'),
        ("null", {"string", "null"}, "null"),
    ],
)
def test_values_as_json(text: str, kinds: set[str], expected: str) -> None:
    assert json_of(text, frozenset(kinds)) == expected


def test_python_literals() -> None:
    assert python_value("{1: (2, 'x')}") == '{"1": [2, "x"]}'
    for text in ("f()", "{1, 2}", "b'x'", "1" * 70_000, "", "x = 1"):
        assert python_value(text) is None
