"""Every field that asks for structured output, as its users write it."""

import json
from typing import Any

import pytest

from common.errors import Reject
from common.protocol import Grammar
from services.api.schema.completion import BODY
from services.api.schema.structured import grammar_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}


def parse(**fields: Any) -> Grammar | None:
    return grammar_of(BODY.parse(json.dumps({"prompt": "x", **fields}).encode()))


def named(**members: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", **members}}


@pytest.mark.parametrize(
    ("fields", "kind", "content", "param"),
    [
        (
            {"response_format": named(schema=SCHEMA, strict=True)},
            "json_schema",
            SCHEMA,
            "response_format.json_schema.schema",
        ),
        ({"response_format": named(schema=SCHEMA)}, "json_schema", SCHEMA, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            "json_schema",
            SCHEMA,
            "response_format.schema",
        ),
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA, "response_format"),
        ({"response_format": {"type": "structural_tag", **TAG}}, "structural_tag", TAG, "response_format"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "structural_tag",
            {"format": {"type": "any_text"}},
            "response_format",
        ),
        ({"response_format": {"type": "regex", "regex": "a+"}}, "regex", "a+", "response_format.regex"),
        (
            {"response_format": {"type": "regex_schema", "regex_schema": "a+"}},
            "regex",
            "a+",
            "response_format.regex_schema",
        ),
        ({"response_format": {"type": "choice", "choice": ["a"]}}, "choice", ["a"], "response_format.choice"),
        ({"response_format": {"type": "grammar", "grammar": "g"}}, "grammar", "g", "response_format.grammar"),
        ({"response_format": {"type": "ebnf", "ebnf": "g"}}, "grammar", "g", "response_format.ebnf"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA, "structured_outputs.json"),
        (
            {"structured_outputs": {"json_object": True}},
            "json_schema",
            {"type": "object"},
            "structured_outputs.json_object",
        ),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "g"}}, "grammar", "g", "structured_outputs.grammar"),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
            "structural_tag",
            TAG,
            "structured_outputs.structural_tag",
        ),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
        ({"guided_grammar": "g"}, "grammar", "g", "guided_grammar"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "json_schema"),
        ({"regex": "a"}, "regex", "a", "regex"),
        ({"ebnf": "g"}, "grammar", "g", "ebnf"),
        ({"grammar": "g"}, "grammar", "g", "grammar"),
        ({"structural_tag": TAG}, "structural_tag", TAG, "structural_tag"),
    ],
)
def test_fields(fields: dict[str, Any], kind: str, content: Any, param: str) -> None:
    grammar = parse(**fields)
    assert grammar is not None and (grammar.kind, grammar.param) == (kind, param)
    assert (
        json.loads(grammar.text) if kind in ("json_schema", "choice", "structural_tag") else grammar.text
    ) == content


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {"json_object": False}},
        {"guided_json": None},
    ],
)
def test_nothing_is_asked(fields: dict[str, Any]) -> None:
    assert parse(**fields) is None


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"response_format": named(schema=SCHEMA, strict=False)}, {"lenient": True}),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, {"whitespace_pattern": " ?"}),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            {"whitespace_flexible": False, "whitespace_pattern": None},
        ),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "x"}, {"whitespace_pattern": "x"}),
    ],
)
def test_options_go_with_the_schema(fields: dict[str, Any], options: dict[str, Any]) -> None:
    grammar = parse(**fields)
    assert grammar is not None and json.loads(grammar.text) == SCHEMA | {"x-guidance": options}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "Invalid enum"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "required"),
        ({"response_format": named()}, "response_format.json_schema.schema", "required"),
        ({"response_format": {"type": "regex"}}, "response_format.regex", "required"),
        ({"guided_regex": 1}, "guided_regex", "Expected"),
        ({"guided_choice": []}, "guided_choice", "Expected"),
        ({"guided_choice": [""]}, "guided_choice[0]", "Expected"),
        ({"guided_json": "{"}, "guided_json", "no JSON schema"),
        ({"guided_json": "[]"}, "guided_json", "no JSON schema"),
        ({"guided_json": deep(70)}, "guided_json", "nested deeper"),
        ({"structural_tag": deep(70)}, "structural_tag", "nested deeper"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            "structured_outputs",
            "additionalProperties",
        ),
        ({"structured_outputs": {"jsn": SCHEMA}}, "structured_outputs", "has none of"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "both say"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex", "both say"),
        ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json", "both say"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(Reject) as caught:
        parse(**fields)
    assert caught.value.param == param and told in caught.value.message
