"""Hermes 2 Pro, Qwen 2.5 and Qwen 3, MiMo 7B: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from common.dialects import json_text
from common.dialects.dialect import ToolDialect, marked
from common.dialects.forms import Form
from common.dialects.scanner import Scanner, Script
from common.dialects.tools import Tools

BEGIN, END = "<tool_call>", "</tool_call>"


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    def call() -> Script[None]:
        yield from scanner.spaces()
        yield from json_text.call(scanner)

    yield from marked(scanner, (BEGIN,), (END,), call)


FORM = Form(BEGIN, BEGIN + '\n{"name": "{name}", "arguments": ', "}\n" + END, "\n")
DIALECT = ToolDialect("hermes", ((BEGIN,),), (BEGIN, END), read, (FORM,))
