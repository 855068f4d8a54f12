"""Answers as each family's published template writes them, and readers that see them whole or in pieces."""

import json
from typing import Any, NamedTuple

from common.dialects.events import Arguments, CallBegun, Content, Event, Reasoning, merged
from common.dialects.registry import REASONING, TOOLS, Dialects, Reader
from common.dialects.tools import Tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "when": {"type": ["string", "null"]},
                "places": {"type": "array"},
                "detailed": {"type": "boolean"},
            },
        },
    },
}
TIME = {"type": "function", "function": {"name": "time.now", "parameters": {}}}
ASKED = Tools([WEATHER, TIME])
PARIS = {"city": "Paris, «la»\nville {1}", "days": 3}
PARIS_JSON = json.dumps(PARIS, ensure_ascii=False)


class Said(NamedTuple):
    """A whole answer. Calls are (name, arguments)."""

    content: str
    calls: list[tuple[str, str]]
    reasoning: str = ""


def events_of(reader: Reader, pieces: list[str]) -> list[Event]:
    found = [event for piece in pieces for event in reader.feed(piece)]
    return merged(found + reader.finish())


def reader_of(tools: str, reasoning: str = "", opened: bool = False, asked: Tools | None = ASKED) -> Reader:
    return Reader(Dialects(TOOLS.get(tools), REASONING.get(reasoning)), asked, opened)


def said(events: list[Event]) -> Said:
    calls: list[tuple[str, str]] = []
    content = reasoning = ""
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallBegun):
            assert event.call == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            name, arguments = calls[event.call]
            calls[event.call] = name, arguments + event.text
    return Said(content, calls, reasoning)


def read(text: str, tools: str = "", reasoning: str = "", opened: bool = False, asked: Tools | None = ASKED) -> Said:
    """The answer read whole; that reading it letter by letter says the same is checked here."""
    whole = events_of(reader_of(tools, reasoning, opened, asked), [text])
    assert events_of(reader_of(tools, reasoning, opened, asked), list(text)) == whole
    return said(whole)


def objects(answer: Said) -> list[tuple[str, Any]]:
    """Its calls with their arguments as objects."""
    return [(name, json.loads(arguments)) for name, arguments in answer.calls]


TAGGED = "<parameter=city>{n}Paris, «la»\nville {{1}}{n}</parameter>\n<parameter=days>{n}3{n}</parameter>"
# By dialect: content, then a call of get_weather with PARIS, and one of time.now without arguments.
EXAMPLES: dict[str, str] = {
    "hermes": f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS_JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time.now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "Let me see.\n<tool_call>\n<function=get_weather>\n"
    + TAGGED.format(n="\n")
    + "\n</function>\n</tool_call>\n<tool_call>\n<function=time.now>\n</function>\n</tool_call>",
    "mimo": "Let me see.\n<tool_call>\n<function=get_weather>\n"
    + TAGGED.format(n="")
    + "\n</function>\n</tool_call>\n<tool_call>\n<function=time.now>\n</function>\n</tool_call>",
    "llama_json": f'{{"name": "get_weather", "parameters": {PARIS_JSON}}}; {{"name": "time.now", "parameters": {{}}}}',
    "pythonic": "[get_weather(city='Paris, «la»\\nville {1}', days=3), time.now()]",
    "mistral": f"Let me see.[TOOL_CALLS]get_weather[ARGS]{PARIS_JSON}[TOOL_CALLS]time.now[ARGS]{{}}",
    "deepseek_v3": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    f"```json\n{PARIS_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time.now\n"
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    f"{PARIS_JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>time.now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v32": 'Let me see.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris, «la»\nville {1}</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="time.now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi_k2": "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{PARIS_JSON}<|tool_call_end|><|tool_call_begin|>functions.time.now:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "glm": "Let me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris, «la»\nville {1}"
    "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>time.now\n</tool_call>",
    "minimax": 'Let me see.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris, «la»\n'
    'ville {1}</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="time.now">\n</invoke>\n'
    "</minimax:tool_call>",
    "harmony": "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.get_weather <|constrain|>json<|message|>{PARIS_JSON}<|call|>"
    "<|start|>assistant to=functions.time.now<|channel|>commentary json<|message|>{}",
}
SILENT = ("llama_json", "pythonic")  # the whole answer is calls
