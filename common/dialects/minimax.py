"""MiniMax M2: `<minimax:tool_call> <invoke name="NAME"> <parameter name="KEY">VALUE</parameter> ... </invoke> ...`.

One block holds any number of calls.
"""

from common.dialects.dialect import ToolDialect, marked
from common.dialects.forms import Form, Parameter, tagged
from common.dialects.parameters import Tags, tagged_calls
from common.dialects.scanner import Scanner, Script
from common.dialects.tools import Tools

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
TAGS = Tags("<invoke name=", ">", "</invoke>", "<parameter name=", ">", "</parameter>")


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    yield from marked(scanner, (BEGIN,), (END,), lambda: tagged_calls(scanner, TAGS, tools))


PARAMETER = Parameter(f'{TAGS.parameter}"{{key}}">', TAGS.parameter_end)
FORM = Form(BEGIN, f'{TAGS.call}"{{name}}">\n', TAGS.call_end, "\n", (f"{BEGIN}\n", f"\n{END}"), tagged(PARAMETER))
DIALECT = ToolDialect("minimax", ((BEGIN,),), (BEGIN, END), read, (FORM,))
