"""Qwen 3 Coder and later: parameters as tagged text, each value on lines of its own.

<tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> ... </function> </tool_call>
"""

from common.dialects.dialect import ToolDialect, marked
from common.dialects.forms import Form, Parameter, tagged
from common.dialects.parameters import Tags, tagged_call
from common.dialects.scanner import Scanner, Script
from common.dialects.tools import Tools

BEGIN, END = "<tool_call>", "</tool_call>"
TAGS = Tags("<function=", ">", "</function>", "<parameter=", ">", "</parameter>", newlines=True)


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    yield from read_tagged(scanner, tools, TAGS)


def read_tagged(scanner: Scanner, tools: Tools, tags: Tags) -> Script[None]:
    def call() -> Script[None]:
        yield from scanner.spaces()
        yield from tagged_call(scanner, tags, tools)

    yield from marked(scanner, (BEGIN,), (END,), call)


def form_of(parameter: Parameter) -> Form:
    before, after = f"{BEGIN}\n{TAGS.call}{{name}}>\n", f"{TAGS.call_end}\n{END}"
    return Form(BEGIN, before, after, "\n", arguments=tagged(parameter))


FORM = form_of(Parameter(f"{TAGS.parameter}{{key}}>\n", TAGS.parameter_end, "\n"))
DIALECT = ToolDialect("qwen3_coder", (("<function=", "<parameter="),), (BEGIN, END), read, (FORM,))
