"""What the forms allow, the dialects' readers read: walks at random through the grammar of each dialect's calls."""

import json
import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from common.dialects.forms import Tool, Tree, may_call, must_call
from common.dialects.registry import TOOLS
from common.dialects.tools import Tools
from common.structural_tag import to_lark
from tests.common.dialects.reading import EXAMPLES, objects, read

BYTES = LLTokenizer("byte")
CLOSING = frozenset(b'"}])<\n')
ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "maximum": 99, "minimum": 0},
        "unit": {"type": "string", "enum": ["m", "km h"]},
        "note": {"type": "string"},
        "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
    "required": ["a", "unit"],
    "additionalProperties": False,
}
STRICT = [Tool("math.add", ADD, strict=True), Tool("stop", {}, strict=True)]
ASKED = Tools([{"function": {"name": tool.name, "parameters": tool.schema}} for tool in STRICT])


def matcher_of(tree: Tree) -> LLMatcher:
    matcher = LLMatcher(BYTES, to_lark(json.dumps({"format": tree})), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def matches(tree: Tree, text: str) -> bool:
    matcher, content = matcher_of(tree), list(text.encode())
    return matcher.try_consume_tokens(content) == len(content) and bool(matcher.is_accepting())


def ends_of(tree: Any) -> list[bytes]:
    """What stands behind texts in it."""
    if isinstance(tree, list):
        return [end for each in tree for end in ends_of(each)]
    own = [tree["end"].encode()] if isinstance(tree, dict) and tree.get("end") else []
    return own + [end for each in tree.values() for end in ends_of(each)] if isinstance(tree, dict) else own


def walk(tree: Tree, source: random.Random) -> str:
    """A text of the grammar; it likes to end."""
    matcher, mask, text = matcher_of(tree), allocate_token_bitmask(1, BYTES.vocab_size), bytearray()
    ends = ends_of(tree)
    while not matcher.is_stopped() and not (matcher.is_accepting() and source.random() < 0.7):
        outside = text[text.rfind(b">") + 1 :].count(b'"') % 2 == 0  # no reader sees that a marker is in a JSON string
        if ends and outside and source.random() < 0.15:
            end = source.choice(ends)
            if matcher.validate_tokens(list(end)) == len(end):
                assert matcher.consume_tokens(list(end))
                text += end
                continue
        fill_next_token_bitmask(matcher, mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:256]).tolist()
        plain = [byte for byte in allowed if 32 <= byte < 127 or byte == 10] if len(allowed) > 8 else allowed
        plain = [byte for byte in plain if byte != ord(">")] or plain
        closing = [byte for byte in plain if byte in CLOSING]
        byte = source.choice(closing if closing and source.random() < 0.6 else plain or allowed)
        assert matcher.consume_token(byte), matcher.get_error()
        text.append(byte)
        assert len(text) < 4000, text
    return text.decode()


def is_right(name: str, arguments: Any) -> bool:
    if name == "stop":
        return bool(arguments == {})
    kinds = {"a": int, "unit": str, "note": str, "deep": dict}
    typed = all(type(value) is kinds[key] for key, value in arguments.items())
    whole = typed and {"a", "unit"} <= set(arguments)
    return whole and 0 <= arguments["a"] < 100 and arguments["unit"] in ("m", "km h")


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("name", TOOLS)
def test_whatever_is_written_is_read(name: str, many: bool) -> None:
    source, counts = random.Random(name), set[int]()
    tree = must_call(TOOLS[name].forms, STRICT, many)
    for _ in range(20):
        text = walk(tree, source)
        answer = read(text, name, asked=ASKED)
        assert answer.calls and not answer.content, text
        assert all(is_right(*call) for call in objects(answer)), text
        counts.add(len(answer.calls))
    assert (max(counts) > 1) is (many and all(form.many for form in TOOLS[name].forms))


@pytest.mark.parametrize("name", TOOLS)
def test_what_templates_write_is_allowed(name: str) -> None:
    """And only what the request knows."""
    tools = [
        Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
    ]
    text, forms = EXAMPLES[name], TOOLS[name].forms
    if name in ("pythonic", "harmony"):
        text = text.replace("'", '"').replace("<|call|><|start|>assistant to=functions.time.now", "")
        text = text.partition("<|channel|>commentary json")[0]
    allowed = may_call(forms, [*tools, Tool("time.now", {})], True)
    assert matches(allowed, text) and not matches(may_call(forms, tools, True), EXAMPLES[name])
    assert matches(allowed, "Well.")


def tool(strict: bool = True, **schema: Any) -> Tool:
    return Tool("f", {"type": "object", **schema}, strict)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern of 'a' cannot be enforced"),
        ({"properties": {"a b": {}}}, "no way to write a parameter named 'a b'"),
        ({"properties": {"a": {}}, "anyOf": [{}]}, "anyOf beside properties"),
        ({"$ref": "#/$defs/x"}, "a schema without properties"),
    ],
)
def test_what_tags_cannot_enforce_is_refused_if_it_is_strict(schema: dict[str, Any], told: str) -> None:
    forms = TOOLS["qwen3_coder"].forms
    with pytest.raises(ValueError, match=told):
        must_call(forms, [tool(**schema)], True)
    must_call(forms, [tool(strict=False, **schema)], True)
    must_call(TOOLS["hermes"].forms, [tool(**schema)], True)


def test_parameters_that_no_schema_lists() -> None:
    free = must_call(TOOLS["glm"].forms, [tool(strict=False)], True)
    assert matches(free, "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>")
    none = must_call(TOOLS["glm"].forms, [tool(strict=False, additionalProperties=False)], True)
    assert not matches(none, "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>")


def test_parameters_may_refer_to_definitions() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/n"}, "b": {"const": "x"}}, "$defs": {"n": {"type": "integer"}}}
    tree = must_call(
        TOOLS["pythonic"].forms, [Tool("f", {"type": "object", "required": ["b"], **schema}, strict=True)], False
    )
    assert matches(tree, '[f(a=1, b="x")]') and matches(tree, '[f(b="x")]')
    assert not matches(tree, '[f(a="1", b="x")]') and not matches(tree, "[f(a=1)]")
