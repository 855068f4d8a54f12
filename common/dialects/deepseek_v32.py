"""DeepSeek V3.2 (DSML), and V4, whose blocks have another name. Each parameter tells whether it is a string.

<｜DSML｜invoke name="NAME"> <｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter> ... </｜DSML｜invoke>
"""

from common.dialects.dialect import ToolDialect, marked
from common.dialects.forms import Form, Parameter, tagged
from common.dialects.parameters import Tags, tagged_calls
from common.dialects.scanner import Scanner, Script
from common.dialects.tools import Tools

OPEN, CLOSE = "<｜DSML｜", "</｜DSML｜"
BEGINS = (OPEN + "function_calls>", OPEN + "tool_calls>")
ENDS = (CLOSE + "function_calls>", CLOSE + "tool_calls>")
TAGS = Tags(OPEN + "invoke name=", ">", CLOSE + "invoke>", OPEN + "parameter name=", ">", CLOSE + "parameter>")


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    yield from marked(scanner, BEGINS, ENDS, lambda: tagged_calls(scanner, TAGS, tools))


PARAMETER = Parameter(f'{TAGS.parameter}"{{key}}" string="{{string}}">', TAGS.parameter_end)
FORMS = tuple(
    Form(begin, f'{TAGS.call}"{{name}}">\n', TAGS.call_end, "\n", (f"{begin}\n", f"\n{end}"), tagged(PARAMETER))
    for begin, end in zip(BEGINS, ENDS, strict=True)
)
DIALECT = ToolDialect(
    "deepseek_v32", ((OPEN,),), ("｜DSML｜",), read, FORMS, model_types=("deepseek_v32", "deepseek_v4")
)
