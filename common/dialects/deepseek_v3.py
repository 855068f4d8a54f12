"""DeepSeek V3 and R1: TYPE<｜tool▁sep｜>NAME, then the arguments in a fenced block, between a call's markers."""

from common.dialects import json_text
from common.dialects.dialect import ToolDialect, marked
from common.dialects.forms import Form
from common.dialects.scanner import Malformed, Scanner, Script
from common.dialects.tools import Tools

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKERS = (BEGIN, END, CALL, SEPARATOR, CALL_END)
FENCE = "```"


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    yield from marked(scanner, (CALL,), (CALL_END,), lambda: _call(scanner), section=(BEGIN, END))


def _call(scanner: Scanner) -> Script[None]:
    yield from scanner.collect(SEPARATOR)
    name, _ = yield from scanner.collect("\n")
    yield from scanner.expect(FENCE)
    yield from scanner.collect("\n")
    yield from arguments(scanner, name.strip())
    yield from scanner.spaces()
    yield from scanner.skip(FENCE)


def arguments(scanner: Scanner, name: str, identity: str = "") -> Script[None]:
    """An object; commits the call when it begins. Raises Malformed if something else does."""
    yield from scanner.spaces()
    if not (yield from scanner.next_is("{")):
        raise Malformed
    scanner.call(name, identity)
    yield from json_text.value(scanner, scanner.arguments)


FORM = Form(
    BEGIN, f"{CALL}function{SEPARATOR}{{name}}\n{FENCE}json\n", f"\n{FENCE}{CALL_END}", "\n", section=(BEGIN, END)
)
DIALECT = ToolDialect("deepseek_v3", ((CALL, FENCE),), MARKERS, read, (FORM,))
