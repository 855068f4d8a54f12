"""The fields that ask for structured output, OpenAI's and those of other servers, as one Grammar. Pure.

Only the form is checked here; the tokenizer finds out whether a schema, an expression or a grammar can be used.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.protocol import Grammar
from services.api.errors import invalid
from services.api.schema.parse import check_depth

MAX_CHOICES = 10_000
Kind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
Schema = dict[str, Any] | bool
Words = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)]
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class JsonSchema(msgspec.Struct, frozen=True):
    """OpenAI's json_schema. What is not supported of a schema is refused unless `strict` is false."""

    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's types, and those that vLLM, SGLang, LMDeploy and llama.cpp add."""

    type: Literal["text", "json_object", "json_schema", "regex", "regex_schema", "choice", "grammar", "ebnf",
                  "structural_tag"]  # fmt: skip
    json_schema: JsonSchema | None = None
    schema: Schema | None = None  # of a json_object
    regex: str | None = None
    regex_schema: str | None = None
    choice: Words | None = None
    grammar: str | None = None
    ebnf: str | None = None
    structures: Any = None
    triggers: Any = None
    format: Any = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's structured_outputs."""

    json: str | Schema | None = None
    regex: str | None = None
    choice: Words | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # there is none


class StructuredFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request that ask for structured output; at most one of them may."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: Words | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None  # accepted: there is one
    json_schema: str | Schema | None = None  # SGLang's and llama.cpp's
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None


def grammar_of(asked: StructuredFields) -> Grammar | None:
    """What the output must match; None if anything will do. Raises Reject."""
    spaces = {"whitespace_pattern": asked.guided_whitespace_pattern} if asked.guided_whitespace_pattern else {}
    found = [
        _response_format(asked.response_format),
        *_structured_outputs(asked.structured_outputs),
        _schema(asked.guided_json, "guided_json", spaces),
        _of("regex", asked.guided_regex, "guided_regex"),
        _of("choice", asked.guided_choice, "guided_choice"),
        _of("grammar", asked.guided_grammar, "guided_grammar"),
        _schema(asked.json_schema, "json_schema"),
        _of("regex", asked.regex, "regex"),
        _of("grammar", asked.ebnf, "ebnf"),
        _of("grammar", asked.grammar, "grammar"),
        _of("structural_tag", asked.structural_tag, "structural_tag"),
    ]
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        fields = " and ".join(grammar.param for grammar in grammars)
        raise invalid(f"{fields} both say what the output must match; give one", grammars[1].param)
    return grammars[0] if grammars else None


def _response_format(asked: ResponseFormat | None) -> Grammar | None:
    if asked is None or asked.type == "text":
        return None
    at = "response_format"
    if asked.type == "json_object":
        return _schema(ANY_OBJECT if asked.schema is None else asked.schema, at)
    if asked.type == "json_schema":
        named = asked.json_schema
        schema = asked.schema if named is None else named.schema
        where = f"{at}.json_schema.schema" if named is not None or schema is None else f"{at}.schema"
        options = {"lenient": True} if named is not None and named.strict is False else {}
        return _schema(_needed(schema, where), where, options)
    if asked.type == "structural_tag":
        members = {"structures": asked.structures, "triggers": asked.triggers, "format": asked.format}
        return _of("structural_tag", {name: value for name, value in members.items() if value is not None}, at)
    kinds: dict[str, Kind] = {"regex_schema": "regex", "ebnf": "grammar", "regex": "regex", "choice": "choice"}
    where = f"{at}.{asked.type}"
    return _of(kinds.get(asked.type, "grammar"), _needed(getattr(asked, asked.type), where), where)


def _structured_outputs(asked: StructuredOutputs | None) -> list[Grammar | None]:
    if asked is None:
        return []
    at, options = "structured_outputs", dict[str, Any]()
    kinds = (asked.json, asked.regex, asked.choice, asked.grammar, asked.json_object, asked.structural_tag)
    if all(kind is None for kind in kinds):
        text = "has none of json, regex, choice, grammar, json_object and structural_tag"
        raise invalid(f"{at} {text}, so that it says nothing about the output", at)
    if asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    if asked.disable_any_whitespace:
        options |= {"whitespace_flexible": False, "whitespace_pattern": None}
    schema = asked.json
    if asked.disable_additional_properties and schema is not None:
        raise invalid(f"{at}.disable_additional_properties: say additionalProperties false in the schema", at)
    return [
        _schema(schema, f"{at}.json", options),
        _schema(ANY_OBJECT if asked.json_object else None, f"{at}.json_object", options),
        _of("regex", asked.regex, f"{at}.regex"),
        _of("choice", asked.choice, f"{at}.choice"),
        _of("grammar", asked.grammar, f"{at}.grammar"),
        _of("structural_tag", asked.structural_tag, f"{at}.structural_tag"),
    ]


def _needed(value: Any, where: str) -> Any:
    if value is None:
        raise invalid(f"{where} is required", where)
    return value


def _schema(asked: str | Schema | None, where: str, options: dict[str, Any] | None = None) -> Grammar | None:
    """`options` go with the schema, under the name that its compiler knows."""
    if asked is None:
        return None
    if isinstance(asked, str):
        try:
            asked = msgspec.json.decode(asked, type=Schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"{where} is no JSON schema: {error}", where) from error
    check_depth(asked, where)
    if options:
        own = asked if isinstance(asked, dict) else {} if asked else {"not": {}}
        asked = {**own, "x-guidance": options}
    return Grammar("json_schema", msgspec.json.encode(asked).decode(), where)


def _of(kind: Kind, asked: Any, where: str) -> Grammar | None:
    if asked is None:
        return None
    check_depth(asked, where)
    return Grammar(kind, asked if isinstance(asked, str) else msgspec.json.encode(asked).decode(), where)
