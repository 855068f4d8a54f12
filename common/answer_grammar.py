"""What a whole answer must match: reasoning, then calls of tools or what the request asks for, in the model's dialects.

Called by the tokenizer, which alone knows the dialects and how the prompt ends. Pure.
"""

import json
from collections.abc import Sequence
from enum import Enum

from common.constraints import Grammar, ToolUse
from common.dialects import harmony
from common.dialects.dialect import ReasoningDialect
from common.dialects.forms import (
    Tool,
    Tree,
    constant,
    either,
    may_call,
    must_call,
    optional,
    pattern,
    sequence,
    up_to,
)
from common.dialects.registry import Dialects
from common.structural_tag import tree_of

BLANKS = pattern("[ \\t\\r\\n]{0,8}")


class Thinking(Enum):
    """Whether an answer begins with reasoning."""

    NO = 0
    MAY = 1
    BEGUN = 2  # the prompt has its beginning


def answer_grammar(
    asked: Grammar | None, use: ToolUse | None, tools: Sequence[Tool], dialects: Dialects, thinking: Thinking
) -> Grammar | None:
    """`asked` where nothing comes before it. Raises ValueError for what cannot be enforced in these dialects."""
    speaks_harmony = harmony.DIALECT is dialects.tools or harmony.REASONING is dialects.reasoning
    reasons = speaks_harmony or (dialects.reasoning is not None and thinking is not Thinking.NO)
    if use is None and (asked is None or not reasons):
        return asked
    wanted = _tree(asked) if asked is not None else None
    if wanted is not None and speaks_harmony:
        head = constant(f"{harmony.CHANNEL}final"), optional(constant(f" {harmony.CONSTRAIN}json"))
        wanted = sequence(*head, constant(harmony.MESSAGE), wanted)
    if use is not None:
        assert dialects.tools is not None, "whoever has no way of calling tools is refused before"
        forms = dialects.tools.forms
        if use.must:
            wanted = must_call(forms, tools, use.many)
        elif wanted is not None:
            wanted = either([must_call(forms, tools, use.many), wanted])
        else:
            wanted = may_call(forms, tools, use.many)
    assert wanted is not None
    if speaks_harmony:
        thought = up_to(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.ENDS[0])
        wanted = sequence({"type": "star", "content": sequence(thought, constant(f"{harmony.START}assistant"))}, wanted)
    elif reasons and dialects.reasoning is not None:
        wanted = sequence(_reasoning(dialects.reasoning, thinking), wanted)
    param = asked.param if asked is not None and not (use and use.must) else "tools"
    return Grammar("structural_tag", json.dumps({"format": wanted}, ensure_ascii=False, separators=(",", ":")), param)


def _reasoning(dialect: ReasoningDialect, thinking: Thinking) -> Tree:
    if thinking is Thinking.BEGUN:
        return sequence(up_to("", dialect.end), BLANKS)
    return optional(sequence(up_to(dialect.begin, dialect.end), BLANKS))


def _tree(grammar: Grammar) -> Tree:
    if grammar.kind == "json_schema":
        return {"type": "json_schema", "json_schema": json.loads(grammar.text)}
    if grammar.kind == "choice":
        return {"type": "words", "words": json.loads(grammar.text)}
    if grammar.kind == "structural_tag":
        tree: Tree = tree_of(json.loads(grammar.text))
        return tree
    member = "pattern" if grammar.kind == "regex" else "grammar"
    return {"type": grammar.kind, member: grammar.text}
