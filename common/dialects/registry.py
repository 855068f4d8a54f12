"""All dialects by name, the choice of a model's own, and the reader of one answer.

A new dialect is a file of its own and a place in these lists: the first one whose signs are in the chat template is
the model's, so those with the rarer signs come first.
"""

from collections.abc import Iterable
from typing import NamedTuple

from common.dialects import (
    deepseek_v3,
    deepseek_v31,
    deepseek_v32,
    glm,
    harmony,
    hermes,
    kimi_k2,
    llama_json,
    mimo,
    minimax,
    mistral,
    pythonic,
    qwen3_coder,
    think,
)
from common.dialects.dialect import ReasoningDialect, ToolDialect
from common.dialects.events import Event
from common.dialects.scanner import Malformed, Scanner, Script
from common.dialects.tools import Tools
from common.errors import ConfigError

AUTO, NONE = "auto", "none"
SLICE = 2048
TOOLS: dict[str, ToolDialect] = {
    each.name: each
    for each in (
        harmony.DIALECT,
        deepseek_v32.DIALECT,
        deepseek_v3.DIALECT,
        deepseek_v31.DIALECT,
        kimi_k2.DIALECT,
        minimax.DIALECT,
        mimo.DIALECT,
        glm.DIALECT,
        qwen3_coder.DIALECT,
        hermes.DIALECT,
        mistral.DIALECT,
        pythonic.DIALECT,
        llama_json.DIALECT,
    )
}
REASONING: dict[str, ReasoningDialect] = {
    each.name: each for each in (harmony.REASONING, kimi_k2.REASONING, mistral.REASONING, think.KIMI_VL, think.THINK)
}


class Dialects(NamedTuple):
    """What a model speaks; None: nothing is taken apart."""

    tools: ToolDialect | None
    reasoning: ReasoningDialect | None

    @property
    def named(self) -> str:
        """For people."""
        tools, reasoning = (each.name if each else NONE for each in self)
        return f"tool calls: {tools}, reasoning: {reasoning}"

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that must be shown for its answers to be read."""
        found: Iterable[str] = self.tools.markers if self.tools else ()
        if self.reasoning:
            found = (*found, self.reasoning.begin, self.reasoning.end, *self.reasoning.calls, *self.reasoning.markers)
        return frozenset(found) - {""}


def choose(tool_parser: str, reasoning_parser: str, templates: Iterable[str], model_type: str) -> Dialects:
    """By the settings' names, or "auto" by the model's chat templates and its type. Raises ConfigError."""
    text = "\n".join(templates)
    tools = reasoning = None
    if tool_parser == AUTO:
        of_type = (each for each in TOOLS.values() if each.model_types and model_type.startswith(each.model_types))
        tools = next(of_type, None) or next((each for each in TOOLS.values() if _signed(each.signs, text)), None)
    elif tool_parser != NONE:
        tools = TOOLS.get(tool_parser)
        if tools is None:
            raise ConfigError(f"model.tool_parser: {tool_parser!r} is none of auto, none, {', '.join(TOOLS)}")
    if reasoning_parser == AUTO:
        reasoning = next((each for each in REASONING.values() if _signed(each.signs, text)), None)
    elif reasoning_parser != NONE:
        reasoning = REASONING.get(reasoning_parser)
        if reasoning is None:
            known = ", ".join(REASONING)
            raise ConfigError(f"model.reasoning_parser: {reasoning_parser!r} is none of auto, none, {known}")
    return Dialects(tools, reasoning)


def _signed(signs: tuple[tuple[str, ...], ...], text: str) -> bool:
    return any(all(sign in text for sign in group) for group in signs)


class Reader:
    """Reads one answer as its text comes. `tools`: those of the request, None where calls are not looked for."""

    def __init__(self, dialects: Dialects, tools: Tools | None, opened: bool = False) -> None:
        """`opened`: the prompt has begun the reasoning."""
        self._scanner = Scanner()
        self._script = _script(self._scanner, dialects, tools, opened)
        self._running = True
        self._advance()

    def feed(self, text: str) -> list[Event]:
        """What this text makes known."""
        for start in range(0, len(text), SLICE):  # a script moves what it has not taken yet with each step
            self._scanner.buffer += text[start : start + SLICE]
            self._advance()
        return self._news()

    def finish(self) -> list[Event]:
        """The end of the text: what was held back. Nothing of it is lost."""
        scanner = self._scanner
        scanner.ended = True
        self._advance()
        assert not self._running, "a script never waits for more after the end"
        scanner.settle()
        return self._news()

    @property
    def reasoning_spans(self) -> list[tuple[int, int]]:
        """Where reasoning is in the text, its markers included: from, to. The last may still go on."""
        return [(begin, self._scanner.read if end < 0 else end) for begin, end in self._scanner.spans]

    @property
    def reasons(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return any(end < 0 for _, end in self._scanner.spans)

    def _advance(self) -> None:
        """As far as the script gets."""
        if not self._running:
            return
        try:
            next(self._script)
            while self._scanner.too_long:
                self._script.throw(Malformed())
        except StopIteration:
            self._running = False

    def _news(self) -> list[Event]:
        events = self._scanner.events.copy()
        self._scanner.events.clear()  # the list itself is the channels', too
        return events


def _script(scanner: Scanner, dialects: Dialects, tools: Tools | None, opened: bool) -> Script[None]:
    reasoning = dialects.reasoning
    if harmony.DIALECT is dialects.tools or harmony.REASONING is reasoning:
        yield from harmony.read(scanner, tools if dialects.tools else None, reasoning is not None)
        return
    if reasoning:
        yield from think.read(scanner, reasoning, opened)
    if dialects.tools and tools is not None:
        yield from dialects.tools.read(scanner, tools)
    yield from scanner.until(scanner.content.add)
