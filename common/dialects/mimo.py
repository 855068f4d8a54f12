"""MiMo V2: as Qwen 3 Coder, but a value stands between its tags as it is, without lines of its own."""

from common.dialects.dialect import ToolDialect
from common.dialects.qwen3_coder import BEGIN, END, TAGS, read_tagged
from common.dialects.scanner import Scanner, Script
from common.dialects.tools import Tools

VERBATIM = TAGS._replace(newlines=False)


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    yield from read_tagged(scanner, tools, VERBATIM)


DIALECT = ToolDialect("mimo", (), (BEGIN, END), read, model_types=("mimo_v2",))
