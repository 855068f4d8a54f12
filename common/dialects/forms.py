"""How a dialect writes calls, as formats of a structural tag (common/structural_tag.py): what enforces them. Pure.

What is written so, the dialect's own reader reads. A schema's parts that cannot be enforced are a ValueError for a
strict tool, and are left out for others.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from common.dialects.tools import STRING, Tools

Tree = dict[str, Any]
ELSEWHERE = ("$ref", "anyOf", "oneOf", "allOf")  # a schema with these says what it means in other places
OF_TEXT = ("pattern", "format", "minLength", "maxLength")
UNFIT = frozenset("<>\"'=\n\r\t ")  # in the name of a parameter that is part of a tag


class Tool(NamedTuple):
    name: str
    schema: dict[str, Any]  # of the arguments; {}: there are none
    strict: bool = False


Arguments = Callable[[Tool], Tree]


def constant(text: str) -> Tree:
    return {"type": "const_string", "value": text}


def sequence(*elements: Tree) -> Tree:
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Tree]) -> Tree:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(content: Tree) -> Tree:
    return {"type": "optional", "content": content}


def pattern(text: str) -> Tree:
    return {"type": "regex", "pattern": text}


def tag(begin: str, content: Tree, end: str) -> Tree:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def up_to(begin: str, end: str) -> Tree:
    """Any text between them."""
    return tag(begin, {"type": "any_text"}, end)


def json_arguments(tool: Tool) -> Tree:
    schema = tool.schema or {"type": "object", "additionalProperties": False}
    if not any(key in schema for key in (*ELSEWHERE, "type")):
        schema = schema | {"type": "object"}
    return {"type": "json_schema", "json_schema": schema if tool.strict else lenient(schema)}


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """What cannot be enforced is left out."""
    return schema | {"x-guidance": {"lenient": True}}


class Form(NamedTuple):
    """`before` and `after` stand around a call's arguments, {name} is its name; `section` stands around all calls."""

    trigger: str  # from here on a text is a call; empty: only a whole answer is one
    before: str
    after: str
    between: str = ""
    section: tuple[str, str] = ("", "")
    arguments: Arguments = json_arguments
    many: bool = True  # an answer can have more than one


def must_call(forms: Sequence[Form], tools: Sequence[Tool], many: bool) -> Tree:
    """An answer of one call or, with `many`, more, and nothing else. Raises ValueError."""
    return either([_section(form, tools, many) for form in forms])


def may_call(forms: Sequence[Form], tools: Sequence[Tool], many: bool) -> Tree:
    """Any text, in which what begins as a call is one. Raises ValueError."""
    first = forms[0]
    if not first.trigger:
        opening = (first.section[0] or first.before)[0]
        return either([must_call(forms, tools, many), pattern(f"([^\\{opening}\\s](.|\\n)*)?")])
    tags: list[Tree] = []
    for form in forms:
        begin, end = form.section
        whole = begin.startswith(form.trigger)
        tags += [tag(begin, _calls(form, tools, many), end)] if whole else _tags(form, tools)
    return {
        "type": "triggered_tags",
        "triggers": list(dict.fromkeys(form.trigger for form in forms)),
        "tags": tags,
        "stop_after_first": not (many and first.many),
    }


def _section(form: Form, tools: Sequence[Tool], many: bool) -> Tree:
    begin, end = form.section
    return sequence(constant(begin), _calls(form, tools, many), constant(end))


def _calls(form: Form, tools: Sequence[Tool], many: bool) -> Tree:
    return {
        "type": "tags_with_separator",
        "tags": _tags(form, tools),
        "separator": form.between,
        "at_least_one": True,
        "stop_after_first": not (many and form.many),
    }


def _tags(form: Form, tools: Sequence[Tool]) -> list[Tree]:
    return [tag(form.before.replace("{name}", tool.name), form.arguments(tool), form.after) for tool in tools]


class Parameter(NamedTuple):
    """One as the tagged dialects write it: {key} is its name, {string} whether its value is a string."""

    before: str
    end: str  # the first one ends a value
    gap: str = ""  # between a value and its end


def tagged(form: Parameter) -> Arguments:
    """Arguments as a tag for each parameter, in the schema's order; a string is a text, all else is JSON."""

    def arguments(tool: Tool) -> Tree:
        properties, required = _properties(tool)
        if properties is None:
            return _any_parameters(form)
        parameters = [
            each if key in required else optional(each)
            for key, schema in properties.items()
            if (each := _parameter(form, tool, key, schema, key in required))
        ]
        return sequence(*parameters) if parameters else constant("")

    return arguments


def keywords(tool: Tool) -> Tree:
    """KEY=VALUE, ..., in the schema's order. Values are JSON."""
    properties, required = _properties(tool)
    if not properties:
        return constant("")
    elements = [tag(f"{key}=", _value(tool, schema), "") for key, schema in properties.items()]
    places = [place for place, key in enumerate(properties) if key in required]
    return {"type": "members", "elements": elements, "required": places, "separator": ", "}


def _properties(tool: Tool) -> tuple[dict[str, Any] | None, frozenset[str]]:
    """None: any may come. Raises ValueError for a strict tool that does not list them."""
    schema = tool.schema
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and properties:
        if tool.strict and (found := [key for key in ELSEWHERE if key in schema]):
            raise ValueError(f"tool {tool.name}: {found[0]} beside properties cannot be enforced for this model")
        names = required if isinstance(required, list) else []
        return properties, frozenset(each for each in names if isinstance(each, str))
    if tool.strict and any(key in schema for key in ELSEWHERE):
        raise ValueError(f"tool {tool.name}: a schema without properties cannot be enforced for this model")
    return (None if schema and schema.get("additionalProperties") is not False else {}), frozenset()


def _parameter(form: Parameter, tool: Tool, key: str, schema: Any, required: bool) -> Tree | None:
    if not key or UNFIT.intersection(key):
        if required or tool.strict:
            raise ValueError(f"tool {tool.name}: this model has no way to write a parameter named {key!r:.100}")
        return None
    function = {"name": tool.name, "parameters": tool.schema}
    is_text = Tools([{"function": function}]).types(tool.name, key) == STRING
    before = form.before.replace("{key}", key).replace("{string}", "true" if is_text else "false")
    end = f"{form.gap}{form.end}\n"
    if not is_text:
        return tag(before, _value(tool, schema), end)
    if tool.strict and (found := [each for each in OF_TEXT if each in schema]):
        text = f"{found[0]} of {key!r:.100} cannot be enforced for this model, which writes texts as they are"
        raise ValueError(f"tool {tool.name}: {text}")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and (texts := [value for value in values if isinstance(value, str)]):
        return tag(before, either([constant(text) for text in texts]), end)
    return sequence(up_to(before, form.end), constant("\n"))


def _value(tool: Tool, schema: Any) -> Tree:
    """Of one parameter; its schema may refer to definitions at the root."""
    if isinstance(schema, dict):
        schema = schema | {key: tool.schema[key] for key in ("$schema", "$defs", "definitions") if key in tool.schema}
        schema = schema if tool.strict else lenient(schema)
    return {"type": "json_schema", "json_schema": schema}


def _any_parameters(form: Parameter) -> Tree:
    before, after = form.before.replace("{string}", "true").split("{key}")
    name = pattern("[^<>\"'=\\s]+")
    one = sequence(constant(before), name, up_to(after, form.end), constant("\n"))
    return {"type": "star", "content": one}
