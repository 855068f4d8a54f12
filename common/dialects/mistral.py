"""Mistral: `[TOOL_CALLS]NAME[ARGS]{arguments}`, with `[CALL_ID]ID` in some; before that `[TOOL_CALLS][{...}, ...]`."""

from common.dialects import json_text
from common.dialects.deepseek_v3 import arguments
from common.dialects.dialect import ReasoningDialect, ToolDialect, marked
from common.dialects.forms import Form, Tool, Tree, constant, either, json_arguments, pattern, sequence
from common.dialects.scanner import Malformed, Scanner, Script
from common.dialects.tools import Tools

CALLS, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    def calls() -> Script[None]:
        yield from scanner.spaces()
        if (yield from scanner.skip("[")):
            yield from _list(scanner)
        elif (yield from scanner.next_is("{")):
            yield from json_text.call(scanner)
        else:
            yield from _named(scanner)

    yield from marked(scanner, (CALLS,), (CALLS,), calls)


def _list(scanner: Scanner) -> Script[None]:
    first = True
    while True:
        yield from scanner.spaces()
        if not (yield from scanner.next_is("{")):
            break
        if not first:
            scanner.open("")
        try:
            yield from json_text.call(scanner)
        except Malformed:
            if first:
                raise
            scanner.give_up()
            return
        first = False
        yield from scanner.spaces()
        yield from scanner.skip(",")
    if first:
        raise Malformed
    yield from scanner.skip("]")


def _named(scanner: Scanner) -> Script[None]:
    identity = ""
    name, found = yield from scanner.collect(ARGS, ID, "{")
    if found == ID:
        identity, found = yield from scanner.collect(ARGS, "{")
    if found == "{":
        scanner.untake("{")
    yield from arguments(scanner, name.strip(), identity.strip())


def _after_name(tool: Tool) -> Tree:
    identity = sequence(constant(ID), pattern("[a-zA-Z0-9]{9}"), constant(ARGS))
    return sequence(either([constant(ARGS), identity]), json_arguments(tool))


FORMS = (
    Form(CALLS, f"{CALLS}{{name}}", "", arguments=_after_name),
    Form(CALLS, '{"name": "{name}", "arguments": ', "}", ", ", (f"{CALLS}[", "]")),
)
DIALECT = ToolDialect("mistral", ((CALLS,),), (CALLS, ARGS, ID), read, FORMS, short_ids=True)
REASONING = ReasoningDialect("mistral", (("[THINK]",),), "[THINK]", "[/THINK]")
