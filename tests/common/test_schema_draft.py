"""Keywords that one draft enforces and the next only remarks, as another implementation has it."""

import json
from typing import Any

import jsonschema_rs
import pytest

from common.errors import Reject
from common.grammar import check
from common.protocol import Grammar
from common.schema_draft import check_draft

SEVEN, LATER = "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"
HELD = [{"contentMediaType": "application/json"}, {"contentEncoding": "base64"}]


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(schema), "field")


@pytest.mark.parametrize("keyword", HELD)
@pytest.mark.parametrize("within", ["", "properties", "items", "anyOf", "deep"])
def test_what_draft_7_lets_validators_enforce_is_refused_by_name(keyword: dict[str, Any], within: str) -> None:
    schema = {
        "": keyword,
        "properties": {"properties": {"a": keyword}},
        "items": {"items": [{"type": "null"}, keyword]},
        "anyOf": {"anyOf": [{"type": "null"}, keyword]},
        "deep": {"properties": {"enum": {"items": {"definitions": {"default": keyword}}}}},
    }[within]
    with pytest.raises(Reject, match=next(iter(keyword))):
        check(grammar_of({"$schema": SEVEN, **schema}))
    check(grammar_of({"$schema": LATER, **schema}))
    check(grammar_of(schema))
    check(grammar_of({"$schema": SEVEN, **schema, "x-guidance": {"lenient": True}}))
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"$schema": SEVEN, **schema}}}
    with pytest.raises(Reject, match=next(iter(keyword))):
        check(Grammar("structural_tag", json.dumps(tag), "field"))


@pytest.mark.parametrize("keyword", HELD)
def test_another_implementation_draws_the_same_line(keyword: dict[str, Any]) -> None:
    assert not jsonschema_rs.validator_for({"$schema": SEVEN, **keyword}).is_valid("{:")
    assert jsonschema_rs.validator_for({"$schema": LATER, **keyword}).is_valid("{:")


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"contentEncoding": {"type": "string"}}},  # a property's name
        {"enum": [{"contentEncoding": "base64"}], "default": {"contentMediaType": "text/plain"}},
        {"type": "string", "contentEncoding": 3},
    ],
)
def test_the_same_words_elsewhere_are_no_keywords(schema: dict[str, Any]) -> None:
    check_draft({"$schema": SEVEN, **schema})


def test_it_does_not_matter_how_deep_it_is() -> None:
    schema: dict[str, Any] = HELD[1]
    for _ in range(20_000):
        schema = {"not": schema}
    with pytest.raises(ValueError, match="contentEncoding"):
        check_draft({"$schema": SEVEN, "items": schema})
