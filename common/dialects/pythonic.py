"""Llama 3.2 and Llama 4: the answer is a Python list of calls, `[NAME(KEY=VALUE, ...), ...]`.

There are no markers (`<|python_start|>` only sometimes), so only names of the request's own tools count. Arguments come
one by one: a value is shown when it is whole, as JSON.
"""

import re

from common.dialects.dialect import ToolDialect
from common.dialects.forms import Form, keywords
from common.dialects.parameters import Object
from common.dialects.scanner import Malformed, Scanner, Script
from common.dialects.tools import ANY, Tools, json_of, python_value

START, END = "<|python_start|>", "<|python_end|>"
WORD = re.compile(r"[\w.\-]*")
SPECIAL = re.compile(r"""["'\\()\[\]{},]""")
CLOSERS = {"(": ")", "[": "]", "{": "}"}


def read(scanner: Scanner, tools: Tools) -> Script[None]:
    before = yield from scanner.spaces()
    before += yield from scanner.skip(START)
    before += yield from scanner.spaces()
    if (yield from scanner.skip("[")):
        scanner.open(before + "[")
        try:
            yield from _calls(scanner, tools)
        except Malformed:
            scanner.give_up()
        else:
            yield from scanner.spaces()
            yield from scanner.skip(END)
    else:
        scanner.content.add(before)
    yield from scanner.until(scanner.content.add)


def _calls(scanner: Scanner, tools: Tools) -> Script[None]:
    while True:
        yield from scanner.spaces()
        name = yield from _word(scanner)
        if name not in tools:
            raise Malformed
        yield from scanner.expect("(")
        scanner.call(name)
        if not (yield from _arguments(scanner, name, tools)):
            return
        yield from scanner.spaces()
        if not (yield from scanner.skip(",")):
            break
        scanner.open(",")
    yield from scanner.skip("]")


def _word(scanner: Scanner) -> Script[str]:
    word = ""
    while True:
        found = WORD.match(scanner.buffer)
        assert found is not None, "it matches nothing at all, too"
        word += scanner.take(found.end())
        if scanner.buffer or scanner.ended:
            return word
        yield


def _arguments(scanner: Scanner, name: str, tools: Tools) -> Script[bool]:
    """Up to the closing bracket; False where they break off: what is there is left as it is."""
    arguments = Object(scanner, name, tools)
    while True:
        yield from scanner.spaces()
        if (yield from scanner.skip(")")):
            arguments.end()
            return True
        key = yield from _word(scanner)
        yield from scanner.spaces()
        if not key or not (yield from scanner.skip("=")):
            arguments.add_cut(key)
            return False
        yield from scanner.spaces()
        parts: list[str] = []
        whole = yield from _value(scanner, parts)
        text = "".join(parts).strip()
        if not whole:
            arguments.add_cut(key, "".join(parts))
            return False
        arguments.add(key, python_value(text) or json_of(text, ANY))
        yield from scanner.skip(",")


def _value(scanner: Scanner, parts: list[str]) -> Script[bool]:
    """The text of a Python expression up to the comma or bracket behind it; False if the text ends first."""
    closers: list[str] = []
    quote = ""
    while True:
        found = SPECIAL.search(scanner.buffer)
        if found is None:
            parts.append(scanner.take(len(scanner.buffer)))
        else:
            letter = found[0]
            if not quote and not closers and letter in ",)":
                parts.append(scanner.take(found.start()))
                return True
            if letter == "\\" and len(scanner.buffer) == found.end() and not scanner.ended:
                parts.append(scanner.take(found.start()))
                yield
                continue
            parts.append(scanner.take(found.end() + (letter == "\\")))
            if quote:
                quote = "" if letter == quote else quote
            elif letter in "\"'":
                quote = letter
            elif letter in CLOSERS:
                closers.append(CLOSERS[letter])
            elif closers and letter == closers[-1]:
                closers.pop()
            continue
        if scanner.ended:
            return False
        yield


FORM = Form("", "{name}(", ")", ", ", ("[", "]"), keywords)
SIGNS = ((START,), ("[func_name1(",), ("[func1(",))
DIALECT = ToolDialect("pythonic", SIGNS, (START, END), read, (FORM,), ("llama4",))
