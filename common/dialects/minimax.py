"""MiniMax M2: `<minimax:tool_call> <invoke name="NAME"> <parameter name="KEY">VALUE</parameter> ... </invoke> ...`.

One block holds any number of calls.
"""

from common.dialects.dialect import ToolDialect, marked
from common.dialects.parameters import Tags, tagged_calls
from common.dialects.scanner import Scanner, Script
from common.dialects.tools import Tools

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
TAGS = Tags("<invoke name=", ">", "</invoke>", "<parameter name=", ">", "</parameter>")


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    yield from marked(scanner, (BEGIN,), (END,), lambda: tagged_calls(scanner, TAGS, tools))


DIALECT = ToolDialect("minimax", ((BEGIN,),), (BEGIN, END), read)
