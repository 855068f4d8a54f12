"""What a request says of its tools, as far as reading calls of them needs: names, and types of parameters. Pure.

Dialects that write parameters as plain text leave their types to the schema: a parameter that can only be a string is
streamed as one, any other is read as JSON (or as Python writes it) where its type allows, and is a string otherwise.
"""

import ast
import json
from typing import Any

import msgspec

STRING = frozenset({"string"})
ANY: frozenset[str] = frozenset()
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
PYTHON_FAULTS = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
MAX_LITERAL = 64 * 1024  # characters


class Tools:
    """Parameter schemas by tool. Unknown tools and parameters have any type."""

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self._properties: dict[str, dict[str, Any]] = {}
        for function in functions:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, dict) else None
            self._properties[function["name"]] = found if isinstance(found, dict) else {}

    def __contains__(self, name: object) -> bool:
        return name in self._properties

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        """JSON schema's names of the types it may have; empty: any."""
        return _types(self._properties.get(tool, {}).get(parameter))


def _types(schema: Any, depth: int = 4) -> frozenset[str]:
    if not isinstance(schema, dict) or depth == 0:
        return ANY
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(TYPES.get(type(value), "null") for value in values)
    if isinstance(either := schema.get("anyOf") or schema.get("oneOf"), list):
        each = [_types(part, depth - 1) for part in either]
        return frozenset().union(*each) if all(each) else ANY
    return ANY


def json_of(text: str, types: frozenset[str]) -> str:
    """A value written as text, as JSON of one of these types; a string if it is none of them."""
    word = text.strip()
    if types != STRING:
        try:
            value = msgspec.json.decode(word.encode())
            if _fits(value, types):
                return word
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            written = python_value(word)
            if written is not None and _fits(json.loads(written), types):
                return written
    return quoted(text)


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = "null" if value is None else TYPES[type(value)]
    return not types or kind in types or (kind == "integer" and "number" in types)


def python_value(text: str) -> str | None:
    """A Python literal as JSON; None if it is none, or has no JSON form."""
    if len(text) > MAX_LITERAL:
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except PYTHON_FAULTS:
        return None


def quoted(text: str) -> str:
    """The text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)
