"""`<think> ... </think>` before the answer, or other words for it. The prompt may have begun it already."""

from common.dialects.dialect import ReasoningDialect
from common.dialects.scanner import Scanner, Script

THINK = ReasoningDialect("think", (("<think>",), ("</think>",)), "<think>", "</think>")
KIMI_VL = ReasoningDialect("kimi_vl", (("◁think▷",),), "◁think▷", "◁/think▷")


def read(scanner: Scanner, dialect: ReasoningDialect, opened: bool) -> Script[None]:
    """Takes the reasoning, if the text begins with it. What follows is left."""
    before = yield from scanner.spaces()
    begun = yield from scanner.skip(dialect.begin)  # some write it again although the prompt has it
    if not begun and not opened:
        scanner.content.add(before)
        return
    scanner.begin_reasoning(len(before) + len(begun))
    found = yield from scanner.until(scanner.reasoning.add, dialect.end, *dialect.calls)
    if found in dialect.calls:
        scanner.untake(found)
    if found:
        scanner.end_reasoning()
