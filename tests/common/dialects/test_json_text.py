import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.dialects import json_text
from common.dialects.scanner import Malformed, Scanner
from tests.common.dialects.test_scanner import run

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_a_value_is_passed_on_as_it_stands(value: object, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    scanner, parts = Scanner(), list[str]()
    assert run(json_text.value(scanner, parts.append), scanner, text + "</x>") is True
    assert "".join(parts) == text


@pytest.mark.parametrize("text", ['{"a": ', '{"a": ]', '["a}', "<", "", '"\\', '{"a": <'])
def test_a_value_that_breaks_off(text: str) -> None:
    scanner, parts = Scanner(), list[str]()
    assert run(json_text.value(scanner, parts.append), scanner, text) is False
    assert "".join(parts) + scanner.buffer == text


def test_strings() -> None:
    scanner = Scanner()
    assert run(json_text.text_of(scanner), scanner, '"a\\"\\u00e9"') == 'a"é'
    scanner = Scanner()
    with pytest.raises(Malformed):
        run(json_text.text_of(scanner), scanner, "5")
    with pytest.raises(Malformed):
        json_text.decoded('"\\x"')


def test_arguments_as_an_object() -> None:
    assert json_text.object_of('"{\\"a\\": 1}"') == '{"a": 1}' and json_text.object_of("null") == "{}"
    for raw in ("5", '"x"', "[]", "true"):
        with pytest.raises(Malformed):
            json_text.object_of(raw)
