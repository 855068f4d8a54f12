"""Languages held against a JSON Schema validator: texts that must (not) match, and texts drawn from the grammar."""

import json
import random
import re
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from common.errors import Reject, RejectReason
from common.grammar import MAX_BYTES, check, fault_of, make_matcher, source_of
from common.protocol import Grammar

BYTES = LLTokenizer("byte")
EOS = BYTES.eos_token
STRING, INTEGER = {"type": "string"}, {"type": "integer"}


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


# Every kind of keyword, alone and together: (schema, texts that match, texts that do not)
SCHEMAS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "null"}, ["null"], ["nul", "0", ""]),
    ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
    (INTEGER, ["0", "-7", "12345"], ["1.5", "01", "-", "1e3x"]),
    ({"type": "number"}, ["0", "-1.5", "1e9", "2.5E-3"], [".5", "1.", "+1"]),
    (STRING, ['""', '"a\\n\\""', '"é😀"'], ['"', "a", '"a', '"\n"']),
    ({"type": ["string", "null"]}, ['"x"', "null"], ["1"]),
    ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "10", "12"], ["2", "13", "03"]),
    ({"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 3}, ["-2", "0", "2"], ["-3", "3"]),
    ({"type": "number", "minimum": 0.5, "maximum": 2}, ["0.5", "1.75", "2"], ["0.4", "2.01", "-1"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.001", "3"], ["0", "-1"]),
    ({"type": "integer", "multipleOf": 5}, ["0", "15", "1000"], ["7", "12"]),
    ({"type": "string", "minLength": 2, "maxLength": 4}, ['"ab"', '"abcd"', '"éé"'], ['"a"', '"abcde"']),
    ({"type": "string", "pattern": "^[a-c]+$"}, ['"abc"'], ['"abd"', '""']),
    ({"type": "string", "pattern": "b"}, ['"abc"', '"b"'], ['"ac"']),
    ({"type": "string", "pattern": "^(\\([0-9]{3}\\))?[0-9]{3}-[0-9]{4}$"}, ['"555-1212"', '"(888)555-1212"'], ['"5"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"', '"yesterday"']),
    ({"type": "string", "format": "date-time"}, ['"2024-02-29T12:30:00Z"'], ['"2024-02-29"']),
    ({"type": "string", "format": "uuid"}, ['"2eb8aa08-aa98-11ea-b4aa-73b441d16380"'], ['"2eb8aa08"']),
    ({"type": "string", "format": "ipv4"}, ['"192.168.0.1"'], ['"256.1.1.1"', '"1.2.3"']),
    ({"type": "string", "format": "email"}, ['"ann@example.com"'], ['"ann"']),
    ({"enum": ["a", 1, None, True, {"x": [1]}]}, ['"a"', "1", "null", "true", '{"x": [1]}'], ['"b"', "2", "false"]),
    ({"const": "fixed"}, ['"fixed"'], ['"fix"', "1"]),
    ({"const": {"a": [1, 2]}}, ['{"a": [1, 2]}'], ['{"a": [1]}', "{}"]),
    ({"type": "array"}, ["[]", '[1, "a", null]'], ["[", "{}"]),
    ({"type": "array", "items": INTEGER}, ["[]", "[1, 2]"], ['["a"]', "[1.5]"]),
    ({"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3}, ["[1, 2]", "[1,2,3]"], ["[1]", "[1,2,3,4]"]),
    ({"type": "array", "prefixItems": [INTEGER, STRING], "items": False}, ['[1, "a"]', "[1]", "[]"], ['["a"]']),
    ({"type": "array", "prefixItems": [INTEGER], "items": STRING, "minItems": 1}, ['[1, "a", "b"]'], ["[]", "[1, 2]"]),
    ({"type": "array", "items": {"type": "array", "items": INTEGER, "maxItems": 1}}, ["[[1], []]"], ["[1]", "[[1,2]]"]),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ({"type": "object"}, ["{}", '{"a": {"b": []}}'], ["[]", "{a: 1}"]),
    (closed(a=STRING, b=INTEGER), ['{"a": "x", "b": 1}'], ['{"a": "x"}', '{"a": "x", "b": 1, "c": 2}', "{}"]),
    (closed(["b"], a=STRING, b=INTEGER), ['{"b": 1}', '{"a": "x", "b": 1}'], ['{"a": "x"}', "{}"]),
    (closed([], a=STRING, b=INTEGER), ["{}", '{"b": 1}', '{"a": "x"}'], ['{"c": 1}']),
    ({"type": "object", "properties": {"a": INTEGER}}, ['{"a": 1, "z": "x"}', "{}"], ['{"a": "x"}']),
    ({"type": "object", "additionalProperties": INTEGER}, ['{"x": 1, "y": 2}'], ['{"x": "a"}']),
    (
        {"type": "object", "properties": {"a": STRING}, "additionalProperties": INTEGER},
        ['{"a": "x", "b": 1}'],
        ['{"a": 1}'],
    ),
    (
        {"type": "object", "patternProperties": {"^n_": INTEGER}, "additionalProperties": False},
        ['{"n_a": 1}'],
        ['{"n_a": "x"}'],
    ),
    ({"type": "object", "required": ["a"]}, ['{"a": 1}'], ["{}"]),
    ({"type": "object", "minProperties": 1, "properties": {"a": INTEGER}, "required": ["a"]}, ['{"a": 1}'], ["{}"]),
    (closed(a=closed(b=closed(c=INTEGER))), ['{"a": {"b": {"c": 1}}}'], ['{"a": {"b": {}}}']),
    (
        closed(**{"a b": INTEGER, 'q"': STRING, "é": {"type": "null"}}),
        ['{"a b": 1, "q\\"": "", "é": null}'],
        ['{"a b": 1}'],
    ),
    ({"anyOf": [STRING, INTEGER]}, ['"a"', "1"], ["null", "[]"]),
    (
        {"oneOf": [closed(k={"const": "a"}, x=INTEGER), closed(k={"const": "b"}, y=STRING)]},
        ['{"k": "a", "x": 1}'],
        ['{"k": "a", "y": ""}'],
    ),
    ({"anyOf": [{"type": "array", "items": STRING}, {"type": "null"}]}, ["null", '["a"]'], ["[1]"]),
    (
        {
            "allOf": [
                {"type": "object", "properties": {"a": STRING}, "required": ["a"]},
                {"properties": {"b": INTEGER}, "required": ["b"]},
            ]
        },
        ['{"a": "", "b": 1}'],
        ['{"a": ""}'],
    ),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ["3", "5"], ["2", "6"]),
    ({"$ref": "#/$defs/n", "$defs": {"n": INTEGER}}, ["1"], ['"a"']),
    ({"$ref": "#/definitions/n", "definitions": {"n": {"type": "boolean"}}}, ["true"], ["1"]),
    (
        {"$ref": "#/$defs/t", "$defs": {"t": closed([], v=INTEGER, n={"$ref": "#/$defs/t"})}},
        ['{"v": 1, "n": {"n": {}}}'],
        ['{"n": 1}'],
    ),
    (closed(x={"$ref": "#/$defs/a~1b"}) | {"$defs": {"a/b": INTEGER}}, ['{"x": 1}'], ['{"x": ""}']),
    ({"type": "array", "items": {"$ref": "#"}, "maxItems": 2}, ["[]", "[[], [[]]]"], ["[1]"]),
    (
        {"title": "T", "description": "d", "default": 1, "examples": [2], "$comment": "c", "type": "integer"},
        ["3"],
        ['"a"'],
    ),
    (
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "integer", "deprecated": True},
        ["3"],
        ["null"],
    ),
    (
        closed(a={"type": ["integer", "null"]}, b={"anyOf": [STRING, {"type": "null"}]}),
        ['{"a": null, "b": null}'],
        ['{"a": "", "b": 1}'],
    ),
    (closed(s={"type": "string", "enum": ["x", "y"]}), ['{"s": "y"}'], ['{"s": "z"}']),
    (closed(n={"type": "number", "enum": [1, 2.5]}), ['{"n": 2.5}'], ['{"n": 3}']),
    (
        closed(m={"type": "object", "additionalProperties": {"type": "array", "items": INTEGER}}),
        ['{"m": {"k": [1]}}'],
        ['{"m": {"k": 1}}'],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": closed(b=INTEGER), "minItems": 1}},
            "required": ["a"],
            "additionalProperties": False,
        },
        ['{"a": [{"b": 1}]}'],
        ['{"a": []}'],
    ),
    ({}, ["1", "[]", '"a"', "null", "{}"], ["x", ""]),
]


def grammar_of(kind: Any, text: Any) -> Grammar:
    return Grammar(kind, text if isinstance(text, str) else json.dumps(text), "field")


def matches(grammar: Grammar, text: str) -> bool:
    matcher = make_matcher(grammar, BYTES)
    assert fault_of(matcher) == ""
    content = list(text.encode())
    return matcher.try_consume_tokens(content) == len(content) and bool(matcher.is_accepting())


def drawn(grammar: Grammar, source: random.Random) -> str | None:
    """A text of the language, a byte at a time among those that the masks allow; None if it does not end soon."""
    matcher, text = make_matcher(grammar, BYTES), bytearray()
    while len(text) < 400:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        assert len(allowed) and fault_of(matcher) == ""
        ends = [token for token in allowed.tolist() if token == EOS or token in b'"}]']
        # what closes is preferred, so that most texts end
        token = source.choice(ends if ends and source.random() < 0.5 else allowed.tolist())
        if token == EOS:
            return text.decode()
        text.append(token)
        assert matcher.consume_token(token)
    return None


@pytest.mark.parametrize(("schema", "right", "wrong"), SCHEMAS, ids=[str(i) for i in range(len(SCHEMAS))])
def test_schemas(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammar = grammar_of("json_schema", schema)
    check(grammar)
    valid = jsonschema_rs.validator_for(schema, validate_formats=True)
    for text in right:
        assert valid.is_valid(json.loads(text)), "the test is wrong"
        assert matches(grammar, text), text
    for text in wrong:
        assert not matches(grammar, text), text
    # Validators differ about leap seconds and the lengths of addresses.
    drawn_valid = jsonschema_rs.validator_for(schema, validate_formats=False)
    source, ended = random.Random(7), 0
    for _ in range(6):
        if (text := drawn(grammar, source)) is not None:
            ended += 1
            assert drawn_valid.is_valid(json.loads(text)), text
    assert ended


def test_white_space_is_bounded() -> None:
    grammar = grammar_of("json_schema", closed(a=INTEGER))
    assert matches(grammar, '{"a":1}') and matches(grammar, '{\n  "a": 1\n}')
    assert not matches(grammar, '{   "a":1}') and not matches(grammar, '{\n\n"a":1}')
    assert not matches(
        grammar_of(
            "json_schema",
            closed(a=INTEGER) | {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}},
        ),
        '{ "a":1}',
    )


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong"),
    [
        ("regex", "^[a-z]{2}$", "ab", "abc"),
        ("regex", "a|b\\d", "b7", "ab"),
        ("regex", "a/b\\/c", "a/b/c", "a"),
        ("choice", ["yes", 'no "never"', "é\n"], 'no "never"', "no"),
        ("grammar", 'root ::= "a" b+\nb ::= [0-9] | "x"', "a1x", "a"),
        ("grammar", 'start: "a" N\nN: /[0-9]+/', "a12", "a"),
        ("choice", [f"word {i}" for i in range(10_000)], "word 9999", "word"),
        ("grammar", 'start: %json {"type": "integer"}', "12", "x"),
        (
            "structural_tag",
            {"structures": [{"begin": "<a>", "schema": INTEGER, "end": "</a>"}], "triggers": ["<a"]},
            "x <a>1</a>",
            "<a>y",
        ),
    ],
)
def test_other_kinds(kind: str, text: Any, right: str, wrong: str) -> None:
    grammar = grammar_of(kind, text)
    check(grammar)
    assert matches(grammar, right) and not matches(grammar, wrong)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = INTEGER
    for _ in range(depth):
        schema = closed(a=schema)
    return schema


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("json_schema", "{", "EOF"),
        ("json_schema", {"type": "strin"}, "Invalid type"),
        ("json_schema", {"not": {}}, "Unimplemented keys"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"$ref": "#"}, "nothing can come next"),
        ("json_schema", {"$ref": "#/none"}, "does not exist"),
        ("json_schema", {"$ref": "http://example.com/a.json"}, "does not fetch"),
        ("json_schema", "false", "matched by nothing"),
        ("json_schema", {"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable"),
        ("json_schema", nested(200), "recursion limit"),
        (
            "json_schema",
            {
                "allOf": [
                    {
                        "anyOf": [
                            closed([f"a{i}{j}"], **{f"a{i}{j}": {}}) | {"additionalProperties": True} for j in range(4)
                        ]
                    }
                    for i in range(8)
                ]
            },
            "too large",
        ),
        ("json_schema", {"enum": ["x" * 100 + str(i) for i in range(3000)]}, f"more than {MAX_BYTES} bytes"),
        ("grammar", "start: foo", "unknown name"),
        ("grammar", 'start: start "a"', "nothing can come next"),
        ("grammar", "root ::= (", "Expected"),
        ("grammar", "", "No 'root' rule"),
        ("structural_tag", "[]", "no object"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_field(kind: str, text: Any, told: str) -> None:
    with pytest.raises(Reject, match=re.escape(told)) as caught:
        check(grammar_of(kind, text))
    assert caught.value.reason is RejectReason.INVALID and caught.value.param == "field"


@pytest.mark.parametrize("kind", ["json_schema", "regex", "choice", "grammar", "structural_tag"])
@pytest.mark.parametrize(
    "text", ["", "\x00", "\ud800", "{}", "[", "[" * 3000, '"', "null", "9" * 5000, '[{"a": 1}]', "{{{{"]
)
def test_nonsense_is_refused_or_has_a_meaning(kind: str, text: str) -> None:
    refused = None
    try:
        check(grammar_of(kind, text))
    except Reject as reject:
        refused = reject
    assert (refused is not None and refused.param == "field") or source_of(grammar_of(kind, text))


def test_lenient_schemas_leave_out_what_is_not_supported() -> None:
    schema = {"type": "array", "items": INTEGER, "uniqueItems": True, "x-guidance": {"lenient": True}}
    assert matches(grammar_of("json_schema", schema), "[1, 1]")


def test_a_step_that_is_too_dear_is_a_fault() -> None:
    grammar = grammar_of("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}")
    matcher: LLMatcher = make_matcher(grammar, BYTES)
    while not (fault := fault_of(matcher)):
        matcher.compute_bitmask()
        matcher.consume_token(ord("a"))
    assert "lexer" in fault or "too" in fault
