"""MiMo V2: as Qwen 3 Coder, but a value stands between its tags as it is, without lines of its own."""

from common.dialects.dialect import ToolDialect
from common.dialects.forms import Parameter
from common.dialects.qwen3_coder import BEGIN, END, TAGS, form_of, read_tagged
from common.dialects.scanner import Scanner, Script
from common.dialects.tools import Tools

VERBATIM = TAGS._replace(newlines=False)


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    yield from read_tagged(scanner, tools, VERBATIM)


FORM = form_of(Parameter(f"{TAGS.parameter}{{key}}>", TAGS.parameter_end))
DIALECT = ToolDialect("mimo", (), (BEGIN, END), read, (FORM,), model_types=("mimo_v2",))
