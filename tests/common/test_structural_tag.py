import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.structural_tag import to_lark

BYTES = LLTokenizer("byte")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def matches(tag: Any, text: str) -> bool:
    matcher = LLMatcher(BYTES, to_lark(tag if isinstance(tag, str) else json.dumps(tag)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    content = list(text.encode())
    return matcher.try_consume_tokens(content) == len(content) and bool(matcher.is_accepting())


def of(kind: str, **members: Any) -> dict[str, Any]:
    return {"type": kind, **members}


def tag(name: str, end: Any = None) -> dict[str, Any]:
    content = of("json_schema", json_schema=SCHEMA)
    return of("tag", begin=f"<{name}>", content=content, end=f"</{name}>" if end is None else end)


@pytest.mark.parametrize(
    ("tree", "right", "wrong"),
    [
        (of("const_string", value='a"b\n'), ['a"b\n'], ["a"]),
        (of("regex", pattern="[0-9]+/x"), ["12/x"], ["x"]),
        (of("grammar", grammar='root ::= "q" x\nx ::= [0-9]'), ["q1"], ["q"]),
        (of("grammar", grammar='start: "q" X\nX: /[0-9]/'), ["q1"], ["q"]),
        (of("any_text"), ["", "a\nb <x>"], []),
        (of("json_schema", json_schema=SCHEMA), ['{"a": 1}'], ["{}"]),
        (
            of("sequence", elements=[of("const_string", value="x"), tag("t")]),
            ['x<t>{"a": 1}</t>'],
            ["x", '<t>{"a": 1}</t>'],
        ),
        (of("or", elements=[of("const_string", value="x"), of("const_string", value="y")]), ["x", "y"], ["xy"]),
        (
            of(
                "sequence",
                elements=[
                    of("tag", begin="<think>", content=of("any_text"), end="</think>"),
                    of("regex", pattern="ok"),
                ],
            ),
            ["<think>a < b\n</think>ok"],
            ["<think>ok", "ok"],
        ),
        (
            of("tag", begin="", content=of("any_text"), end=["</think>", "<call>"]),
            ["a</think>", "<call>"],
            ["a", "</think>b"],
        ),
        (of("optional", content=of("const_string", value="x")), ["", "x"], ["xx"]),
        (of("star", content=of("const_string", value="x")), ["", "xxx"], ["y"]),
        (of("plus", content=of("regex", pattern="[0-9],")), ["1,", "1,2,"], [""]),
        (of("json_schema", json_schema=True), ['{"a": [1,\n    2]}'], ['{"a":  1}']),
        (of("tag", begin="(", content=of("regex", pattern="[a-z]"), end=[")", "]"]), ["(a)", "(b]"], ["(a"]),
        (of("tag", begin="(", content=of("regex", pattern="[a-z]"), end=["", ")"]), ["(a)", "(a"], ["a"]),
        (
            of("triggered_tags", triggers=["<t", "<u"], tags=[tag("t"), tag("tt"), tag("u")]),
            ["", "free", 'a <tt>{"a": 1}</tt> b <u>{"a": 2}</u>'],
            ["<t", "x <tx>", "<t>{}</t>"],
        ),
        (
            of("triggered_tags", triggers=["<t>"], tags=[tag("t")], at_least_one=True, stop_after_first=True),
            ['hm <t>{"a": 1}</t>'],
            ["hm", '<t>{"a": 1}</t>x'],
        ),
        (
            of("tags_with_separator", tags=[tag("t"), tag("u")], separator=", "),
            ["", '<t>{"a": 1}</t>, <u>{"a": 1}</u>'],
            ['<t>{"a": 1}</t><u>{"a": 1}</u>'],
        ),
        (
            of(
                "sequence",
                elements=[
                    of("tags_with_separator", tags=[tag("t")], separator="\n"),
                    of("const_string", value="\n</all>"),
                ],
            ),
            ['<t>{"a": 1}</t>\n<t>{"a": 2}</t>\n</all>', "\n</all>"],
            ['<t>{"a": 1}</t></all>'],
        ),
        (
            of("tags_with_separator", tags=[tag("t")], separator="", at_least_one=True),
            ['<t>{"a": 1}</t><t>{"a": 1}</t>'],
            [""],
        ),
    ],
)
def test_formats(tree: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert matches(of("structural_tag", format=tree), text), text
    for text in wrong:
        assert not matches(of("structural_tag", format=tree), text), text


def test_the_old_form() -> None:
    old = {"structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}
    assert matches(old, 'Hi <f=a>{"a": 1}</f>, and <f=a>{"a": 2}</f>') and matches(old, "Hi")
    assert not matches(old, "Hi <f=b>")


def deep(levels: int) -> dict[str, Any]:
    tree: dict[str, Any] = of("any_text")
    for _ in range(levels):
        tree = of("sequence", elements=[tree])
    return tree


@pytest.mark.parametrize(
    ("whole", "told"),
    [
        ([], "no object"),
        ({}, "neither format nor structures"),
        ({"structures": []}, "structures is no list"),
        ({"structures": [1], "triggers": ["a"]}, "structures: each"),
        ({"structures": [{"begin": "a"}], "triggers": ["b"]}, "starts with none of the triggers"),
        ({"structures": [{"begin": "a"}], "triggers": [1]}, "triggers[0] is no text"),
        ({"format": 1}, "format.type is none of"),
        ({"format": of("tag", content=of("any_text"), end="x")}, "format.begin is no text"),
        ({"format": of("star")}, "format.content.type is none of"),
        ({"format": of("json_schema", json_schema=False)}, "json_schema is no schema"),
        ({"format": of("tag", begin="a", end=1)}, "format.end is neither"),
        ({"format": of("or", elements=[of("x")])}, "format.elements[0].type"),
        ({"format": of("grammar", grammar="root ::= (")}, "format.grammar: Expected"),
        ({"format": of("tags_with_separator", tags=[tag("a")], separator=1)}, "separator is no text"),
        ({"format": deep(40)}, "deeper than"),
        ({"format": of("or", elements=[of("regex", pattern="a")] * 30_000)}, "more than"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(whole: Any, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        to_lark(json.dumps(whole))
    assert told in str(caught.value)
