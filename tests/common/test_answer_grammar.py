"""Whole answers: reasoning first, then what is asked, or calls; checked byte by byte."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.answer_grammar import Thinking, answer_grammar
from common.constraints import Grammar, ToolUse
from common.dialects.forms import Tool
from common.dialects.registry import REASONING, TOOLS, Dialects
from common.grammar import check, source_of

BYTES = LLTokenizer("byte")
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ADDING = [Tool("add", ADD, strict=True), Tool("stop", {})]
ANY = ToolUse(("add", "stop"))
ONE = ToolUse(("add", "stop"), many=False)
MUST = ToolUse(("add", "stop"), must=True)
JSON = Grammar("json_schema", json.dumps(ADD), "response_format")
TAG = '{"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}'
THINK = Dialects(None, REASONING["think"])
QWEN = Dialects(TOOLS["hermes"], REASONING["think"])
HERMES = Dialects(TOOLS["hermes"], None)
LLAMA = Dialects(TOOLS["llama_json"], None)
HARMONY = Dialects(TOOLS["harmony"], REASONING["harmony"])
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def matches(grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(BYTES, source_of(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    content = list(text.encode())
    return matcher.try_consume_tokens(content) == len(content) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("asked", "use", "dialects", "thinking", "right", "wrong"),
    [
        (JSON, None, THINK, Thinking.BEGUN, ['{} </think>\n\n{"a": 1}'], ['{"a": 1}', "x</think>y"]),
        (JSON, None, THINK, Thinking.MAY, ['{"a": 1}', '<think>\nx</think>{"a": 1}'], ["<think>x", "x"]),
        (Grammar("choice", '["a", "b"]'), None, THINK, Thinking.BEGUN, ["x</think>a"], ["x</think>c"]),
        (Grammar("regex", "[0-9]+/"), None, THINK, Thinking.BEGUN, ["x</think>\n1/"], ["1/"]),
        (Grammar("grammar", 'root ::= "x" [0-9]'), None, THINK, Thinking.BEGUN, ["</think>x1"], ["</think>x"]),
        (
            Grammar("structural_tag", TAG),
            None,
            THINK,
            Thinking.BEGUN,
            ["x</think>y <a>1</a>"],
            ["x</think>y <a>z</a>"],
        ),
        (None, MUST, HERMES, Thinking.NO, [CALL, f"{CALL}\n{STOP}"], ["", f"Well. {CALL}", f"{CALL} Done."]),
        (JSON, MUST, HERMES, Thinking.NO, [CALL], ['{"a": 1}']),
        (JSON, ANY, HERMES, Thinking.NO, [CALL, '{"a": 1}'], ["Well."]),
        (None, ANY, HERMES, Thinking.NO, ["Well.", f"Well. {CALL}\n{STOP}"], ["<tool_call>", CALL.replace("1", "[]")]),
        (None, ONE, HERMES, Thinking.NO, ["Well.", f"Well. {CALL}"], [f"{CALL}\n{CALL}", f"{CALL} And now?"]),
        (None, MUST, QWEN, Thinking.BEGUN, [f"x\n</think>\n\n{CALL}"], [CALL]),
        (None, ANY, LLAMA, Thinking.NO, ["Well. {", '{"name": "add", "parameters": {"a": 1}}', ""], ["{", "\n{}"]),
        (JSON, None, HARMONY, Thinking.NO, [f'{ANALYSIS}{FINAL}{{"a": 1}}', f'{FINAL}{{"a": 1}}'], ['{"a": 1}', FINAL]),
        (
            None,
            MUST,
            HARMONY,
            Thinking.NO,
            [f'{ANALYSIS}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 1}}'],
            [f"{FINAL}Well.", '<|channel|>commentary to=functions.add<|message|>{"a": "1"}'],
        ),
        (
            None,
            ANY,
            HARMONY,
            Thinking.NO,
            [f"{ANALYSIS}{FINAL}Well.", f'{ANALYSIS} to=functions.add<|channel|>commentary json<|message|>{{"a": 1}}'],
            [f"{ANALYSIS}<|channel|>commentary to=functions.add<|message|>Well."],
        ),
    ],
)  # fmt: skip
def test_answers(
    asked: Grammar | None,
    use: ToolUse | None,
    dialects: Dialects,
    thinking: Thinking,
    right: list[str],
    wrong: list[str],
) -> None:
    grammar = answer_grammar(asked, use, ADDING, dialects, thinking)
    assert grammar is not None
    check(grammar)
    for text in right:
        assert matches(grammar, text), text
    for text in wrong:
        assert not matches(grammar, text), text


def test_nothing_is_added_where_nothing_comes_before() -> None:
    assert answer_grammar(JSON, None, [], Dialects(None, None), Thinking.NO) is JSON
    assert answer_grammar(JSON, None, [], QWEN, Thinking.NO) is JSON
    assert answer_grammar(None, None, [], QWEN, Thinking.BEGUN) is None


@pytest.mark.parametrize(("use", "param"), [(MUST, "tools"), (ANY, "response_format")])
def test_the_field_that_is_named(use: ToolUse, param: str) -> None:
    grammar = answer_grammar(JSON, use, ADDING, HERMES, Thinking.NO)
    assert grammar is not None and grammar.param == param


def test_a_choice_of_many() -> None:
    """Each is no rule of its own."""
    choice = Grammar("choice", json.dumps([f"word {i}" for i in range(9000)]), "guided_choice")
    grammar = answer_grammar(choice, None, [], THINK, Thinking.MAY)
    assert grammar is not None
    check(grammar)
    assert matches(grammar, "<think>x</think>word 8999")


def test_a_schema_that_nothing_matches() -> None:
    grammar = answer_grammar(Grammar("json_schema", "false"), None, [], THINK, Thinking.BEGUN)
    assert grammar is not None
    with pytest.raises(ValueError, match="no schema that something matches"):
        source_of(grammar)
