"""GLM 4.5 and later: `<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>`."""

from common.dialects.dialect import ToolDialect, marked
from common.dialects.forms import Form, Parameter, tagged
from common.dialects.parameters import Object
from common.dialects.scanner import Malformed, Scanner, Script
from common.dialects.tools import Tools

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    yield from marked(scanner, (BEGIN,), (END,), lambda: _call(scanner, tools))


def _call(scanner: Scanner, tools: Tools) -> Script[None]:
    yield from scanner.spaces()
    name = ""
    while not name or name[-1] not in "<\n":  # its first line, or up to a tag
        yield from scanner.next_is(" ")  # until there is a character
        if not scanner.buffer:
            raise Malformed
        if scanner.buffer[0] == "<":
            break
        name += scanner.take(1)
    name = name.strip()
    if not name or any(letter.isspace() for letter in name):
        raise Malformed
    yield from scanner.spaces()
    if not (yield from scanner.next_is(KEY, END)):
        raise Malformed
    scanner.call(name)
    arguments = Object(scanner, name, tools)
    while (yield from scanner.skip(KEY)):
        parts: list[str] = []
        if not (yield from scanner.until(parts.append, KEY_END)):
            arguments.add_cut("".join(parts))
            return
        yield from scanner.spaces()
        yield from scanner.skip(VALUE)
        if not (yield from arguments.read("".join(parts).strip(), VALUE_END)):
            return
        yield from scanner.spaces()
    if not scanner.ended:
        arguments.end()


PARAMETER = Parameter(f"{KEY}{{key}}{KEY_END}\n{VALUE}", VALUE_END)
FORM = Form(BEGIN, f"{BEGIN}{{name}}\n", END, "\n", arguments=tagged(PARAMETER))
DIALECT = ToolDialect("glm", (("<arg_key>",),), (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END), read, (FORM,))
