"""Llama 3.1 and later: the whole answer is `{"name": ..., "parameters": {...}}`, or several with `;` between them.

There are no markers (`<|python_tag|>` only sometimes), so only names of the request's own tools count.
"""

from common.dialects import json_text
from common.dialects.dialect import ToolDialect
from common.dialects.forms import Form
from common.dialects.scanner import Malformed, Scanner, Script
from common.dialects.tools import Tools

TAG = "<|python_tag|>"


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    before = yield from scanner.spaces()
    found = yield from scanner.skip(TAG)
    while (yield from scanner.next_is("{")):
        scanner.open(before + found)
        try:
            yield from json_text.call(scanner, known=tools)
        except Malformed:
            scanner.give_up()
            before = found = ""
            break
        before = found = ""
        yield from scanner.spaces()
        before = yield from scanner.skip(";")
        before += yield from scanner.spaces()
    scanner.content.add(before + found)
    while (yield from scanner.until(scanner.content.add, TAG)):  # after some words
        scanner.open(TAG)
        try:
            yield from json_text.call(scanner, known=tools)
        except Malformed:
            scanner.give_up()


FORM = Form("", '{"name": "{name}", "parameters": ', "}", "; ")
DIALECT = ToolDialect("llama_json", ((TAG,), ('"parameters": dictionary',)), (TAG,), read, (FORM,))
