"""Kimi K2: `functions.NAME:INDEX`, which is the call's id, too, and its arguments, between markers around each call."""

import re

from common.dialects.deepseek_v3 import arguments
from common.dialects.dialect import ReasoningDialect, ToolDialect, marked
from common.dialects.forms import Form, Tool, Tree, constant, json_arguments, pattern, sequence
from common.dialects.scanner import Malformed, Scanner, Script
from common.dialects.tools import Tools

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
IDENTITY = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    def call() -> Script[None]:
        written, _ = yield from scanner.collect(ARGUMENTS)
        identity = written.strip()
        found = IDENTITY.fullmatch(identity)
        if not found:
            raise Malformed
        yield from arguments(scanner, found[1], identity)

    yield from marked(scanner, (CALL,), (CALL_END,), call, section=(BEGIN, END))


def _numbered(tool: Tool) -> Tree:
    return sequence(pattern("[0-9]{1,3}"), constant(ARGUMENTS), json_arguments(tool))


FORM = Form(BEGIN, f"{CALL}functions.{{name}}:", CALL_END, section=(BEGIN, END), arguments=_numbered)
DIALECT = ToolDialect("kimi_k2", ((BEGIN,),), (BEGIN, END, CALL, ARGUMENTS, CALL_END), read, (FORM,))
REASONING = ReasoningDialect(
    "kimi_k2", (("<think>", BEGIN), ("</think>", BEGIN)), "<think>", "</think>", calls=(BEGIN,)
)
