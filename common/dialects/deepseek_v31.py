"""DeepSeek V3.1: NAME<｜tool▁sep｜>{arguments} between markers around each call."""

from common.dialects.deepseek_v3 import BEGIN, CALL, CALL_END, END, MARKERS, SEPARATOR, arguments
from common.dialects.dialect import ToolDialect, marked
from common.dialects.forms import Form
from common.dialects.scanner import Scanner, Script
from common.dialects.tools import Tools


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    def call() -> Script[None]:
        name, _ = yield from scanner.collect(SEPARATOR)
        yield from arguments(scanner, name.strip())

    yield from marked(scanner, (CALL,), (CALL_END,), call, section=(BEGIN, END))


FORM = Form(BEGIN, f"{CALL}{{name}}{SEPARATOR}", CALL_END, section=(BEGIN, END))
DIALECT = ToolDialect("deepseek_v31", ((CALL,),), MARKERS, read, (FORM,))
