"""The requests of chaos runs. Pure: number N always is the same request, so its answer can be learnt once.

Half greedy, half seeded; chat and completions; short and long prompts and outputs; some with two choices, penalties or
a stop string. Stop strings are cut from the answers themselves, else nothing would ever meet one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MODEL = "SmolLM2-135M-Instruct"
TOPICS = ("ships", "rivers", "clocks", "bridges", "foxes", "trains", "lamps", "kites")
LENGTHS = (48, 24, 64, 40, 96, 16, 160, 32)  # output tokens, by place in a group of eight
LONG_PROMPT = 60  # words
SEEDS = 2000  # 1041 draws within 5e-8 of the border between two tokens: not even float32 says the same twice


class Ask(NamedTuple):
    number: int
    path: str
    body: dict[str, Any]
    stops: bool = False  # it is to end at a stop string of its own text


def asks(count: int, longest: int = max(LENGTHS)) -> list[Ask]:
    """The first `count`, none with more than `longest` output tokens a choice."""
    return [_ask(number, longest) for number in range(count)]


def _ask(number: int, longest: int) -> Ask:
    place = number % 8
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": min(LENGTHS[place] + number % 5, longest),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if place % 2:
        body |= {"temperature": 0.8, "seed": SEEDS + number}
    else:
        body |= {"temperature": 0}
    if place == 3:
        body |= {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    elif place == 5:
        body |= {"n": 2}
    text = f"Tell a story about {number + 2} {TOPICS[number // 8 % len(TOPICS)]}."
    if place == 7:
        text = " ".join(f"{TOPICS[(number + i) % len(TOPICS)]} {i}," for i in range(LONG_PROMPT // 2)) + " " + text
    stops = place in (2, 3)
    if place in (1, 2, 6):
        return Ask(number, "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}, stops)
    return Ask(number, "/v1/completions", body | {"prompt": text}, stops)


def with_stops(given: Sequence[Ask], texts: Mapping[int, str]) -> list[Ask]:
    """Those that are to end at a stop string get one: a piece of the third quarter of their text (by number)."""
    return [
        ask._replace(body=ask.body | {"stop": text[len(text) * 5 // 8 :][:8]})
        if ask.stops and (text := texts[ask.number])
        else ask
        for ask in given
    ]
