"""gpt-oss: messages in channels, `<|channel|>NAME ... <|message|>TEXT<|end|>`; the prompt has the first one's role.

`analysis` is reasoning. What has a recipient, `to=functions.NAME`, is a call; the rest is content.
"""

import re

from common.dialects.dialect import ReasoningDialect, ToolDialect
from common.dialects.forms import Form, Tool, Tree, constant, json_arguments, pattern, sequence
from common.dialects.scanner import Malformed, Scanner, Script
from common.dialects.tools import Tools

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
NAME = re.compile(r"<\|channel\|>\s*(\w+)")


def read(scanner: Scanner, tools: Tools | None, reasoning: bool = True) -> Script[None]:
    """Without `tools` calls are content; without `reasoning` so is analysis."""
    before = yield from scanner.spaces()
    opening = yield from scanner.skip(START, CHANNEL, "to=", MESSAGE)
    if not opening:
        scanner.content.add(before)  # no channel at all
        opening = yield from scanner.until(scanner.content.add, START, CHANNEL)
    while opening:
        if opening == MESSAGE:
            head = ""
        else:
            scanner.open(opening)
            try:
                head, _ = yield from scanner.collect(MESSAGE)
            except Malformed:
                scanner.give_up()
                opening = yield from scanner.until(scanner.content.add, START, CHANNEL)
                continue
            scanner.accept()
        opening = yield from _message(scanner, opening + head, tools, reasoning)


def _message(scanner: Scanner, head: str, tools: Tools | None, reasoning: bool) -> Script[str]:
    """One message's text, and the marker that begins the next one."""
    recipient, channel = RECIPIENT.search(head), NAME.search(head)
    markers = (*ENDS, START, CHANNEL)
    if recipient and tools is not None:
        scanner.call(recipient[1])
        yield from scanner.spaces()
        found = yield from scanner.until(scanner.arguments, *markers)
    elif reasoning and channel and channel[1] == "analysis" and not recipient:
        scanner.settle()
        scanner.begin_reasoning(len(head) + len(MESSAGE))
        if scanner.reasoning.begun:
            scanner.reasoning.held = "\n"
        found = yield from scanner.until(scanner.reasoning.add, *markers)
        if found:
            scanner.end_reasoning()
    else:
        scanner.settle()
        scanner.content.held = "\n" if scanner.content.begun else ""
        found = yield from scanner.until(scanner.content.add, *markers)
    if found in ENDS:
        yield from scanner.spaces()
        found = yield from scanner.until(scanner.content.add, START, CHANNEL)
    return found


def _headed(tool: Tool) -> Tree:
    head = r"(<\|channel\|>commentary)?( ?<\|constrain\|>json| json)?"
    return sequence(pattern(head), constant(MESSAGE), json_arguments(tool))


# What ends the message of a call ends the answer, so there is one.
FORM = Form(
    " to=functions.", " to=functions.{name}", "", section=(f"{CHANNEL}commentary", ""), arguments=_headed, many=False
)
DIALECT = ToolDialect("harmony", ((CHANNEL, MESSAGE),), MARKERS, read, (FORM,), ("gpt_oss",))
WRITTEN = f"{CHANNEL}analysis{MESSAGE}", f"{ENDS[0]}{START}assistant"
REASONING = ReasoningDialect("harmony", ((CHANNEL, MESSAGE),), "", "", markers=MARKERS, written=WRITTEN)
