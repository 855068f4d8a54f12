"""Structured output over HTTP with the bundled model: whatever is finished matches, streamed or not, killed or not."""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import jsonschema_rs
import pytest

from benchmarks.schemas import Case, say_all
from benchmarks.system import System
from tests.common.test_grammar import SCHEMAS
from tests.e2e.steered import LIMIT_S, Steered

NAME = {"type": "string", "pattern": "^[A-Z][a-z]{1,12}$"}
PERSON = {
    "type": "object",
    "properties": {
        "name": NAME,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["tall", "kind", "quick"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "leaf": {"type": "boolean"},
                "below": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["leaf"],
            "additionalProperties": False,
        }
    },
}
SHAPE = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "size": {"type": "number", "minimum": 0, "maximum": 9}},
            "required": ["kind", "size"],
            "additionalProperties": False,
        }
        for kind in ("circle", "square")
    ]
}
EXPRESSION = "[a-z]{3,9}@[a-z]{3,9}\\.(com|org)"
WORDS = ["certainly", "never", "ask again"]
SUM = 'root ::= number (" + " number){1,3}\nnumber ::= [1-9] [0-9]{0,2}'
CALL = {
    "structures": [{"begin": "<call>", "schema": PERSON, "end": "</call>"}],
    "triggers": ["<call>"],
}


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def is_valid(schema: dict[str, Any]) -> Callable[[str], bool]:
    return lambda text: bool(jsonschema_rs.is_valid(schema, json.loads(text)))


def is_sum(text: str) -> bool:
    return re.fullmatch(r"[1-9]\d{0,2}( \+ [1-9]\d{0,2}){1,3}", text) is not None


def whole_calls(text: str) -> bool:
    """Every call that was begun is whole and right."""
    _, *calls = text.split("<call>")
    return all(is_valid(PERSON)(call.split("</call>")[0]) for call in calls)


TOOLS = [{"type": "function", "function": {"name": name, "parameters": PERSON}} for name in ("meet", "part")]
CALLS = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
PART = {"tool_choice": {"type": "function", "function": {"name": "part"}}}
STRICT = {"tools": [{"type": "function", "function": {"name": "meet", "parameters": PERSON, "strict": True}}]}


def is_call(*names: str) -> Callable[[str], bool]:
    """Of one of them, as `said` tells it."""

    def matches(text: str) -> bool:
        name, _, arguments = text.partition("(")
        return name in names and is_valid(PERSON)(arguments)

    return matches


# field, what its text must be
CASES: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"response_format": format_of(PERSON)}, is_valid(PERSON)),
    ({"response_format": format_of(TREE)}, is_valid(TREE)),
    ({"structured_outputs": {"json": SHAPE}}, is_valid(SHAPE)),
    ({"guided_json": json.dumps(PERSON), "temperature": 0}, is_valid(PERSON)),
    ({"guided_json": PERSON, "top_k": 20, "top_p": 0.9, "presence_penalty": 0.5}, is_valid(PERSON)),
    ({"guided_regex": EXPRESSION}, lambda text: re.fullmatch(EXPRESSION, text) is not None),
    ({"structured_outputs": {"choice": WORDS}}, WORDS.__contains__),
    ({"guided_choice": WORDS, "min_tokens": 64}, WORDS.__contains__),
    ({"guided_choice": WORDS, "ignore_eos": True}, WORDS.__contains__),
    ({"guided_grammar": SUM}, is_sum),
    ({"structured_outputs": {"structural_tag": CALL}, "stop": ["</call>"]}, whole_calls),
    ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    (CALLS, is_call("meet", "part")),
    ({"ebnf": SUM}, is_sum),
    (CALLS | PART, is_call("part")),
    ({"regex": EXPRESSION}, lambda text: re.fullmatch(EXPRESSION, text) is not None),
    (CALLS | STRICT, is_call("meet")),
]


class Answer(NamedTuple):
    texts: list[str]
    reasons: list[str]


def body(number: int, fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"max_tokens": 64, "temperature": 1.0, "seed": 40 + number} | fields | more


def said(message: dict[str, Any]) -> str:
    """Content and calls of a message or delta."""
    calls = (call["function"] for call in message.get("tool_calls") or ())
    each = ((f"{call['name']}(" if call.get("name") else "") + call["arguments"] for call in calls)
    return (message.get("content") or "") + "".join(each)


async def ask(client: httpx.AsyncClient, path: str, asked: dict[str, Any]) -> Answer:
    text = "Tell me about Ann."
    prompt = {"messages": [{"role": "user", "content": text}]} if path.startswith("chat") else {"prompt": text}
    count = asked.get("n", 1)
    texts, reasons = [""] * count, [""] * count
    if not asked.get("stream"):
        response = await client.post(path, json=asked | prompt)
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            texts[choice["index"]] = said(choice["message"]) if "message" in choice else choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
        return Answer(texts, reasons)
    async with client.stream("POST", path, json=asked | prompt) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    texts[choice["index"]] += said(choice["delta"]) if "delta" in choice else choice["text"]
                    reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    return Answer(texts, reasons)


async def ask_all(system: System, asked: list[tuple[str, dict[str, Any]]]) -> list[Answer]:
    async with httpx.AsyncClient(base_url=f"{system.url}/v1/", timeout=LIMIT_S) as client:
        return list(await asyncio.gather(*(ask(client, path, fields) for path, fields in asked)))


def requests(stream: bool) -> list[tuple[str, dict[str, Any]]]:
    """Each case by chat or as a completion, and two requests that may say anything."""
    paths = ("chat/completions", "completions")
    asked = [(paths[i % 2], body(i, fields, stream=stream)) for i, (fields, _) in enumerate(CASES)]
    asked[0][1]["n"] = 3
    return asked + [(path, body(100, {}, stream=stream)) for path in paths]


@pytest.fixture(scope="module")
def calm(bundled: System) -> list[Answer]:
    return asyncio.run(ask_all(bundled, requests(stream=True)))


def test_what_is_finished_matches(calm: list[Answer]) -> None:
    finished = 0
    for answer, (fields, matches) in zip(calm, CASES, strict=False):
        for text, reason in zip(answer.texts, answer.reasons, strict=True):
            assert reason in ("tool_calls" if "tools" in fields else "stop", "length"), (fields, answer)
            if reason != "length":
                assert matches(text), (fields, text)
                finished += 1
    assert finished >= len(CASES) - 2
    assert len(set(calm[0].texts)) == 3, "three choices of one seed"


def test_schemas_of_all_kinds(bundled: System) -> None:
    """`python -m benchmarks.schemas` asks those of the public test suite."""
    cases = [Case(str(number), schema, []) for number, (schema, _, _) in enumerate(SCHEMAS) if number % 2]
    finished = [each for each in asyncio.run(say_all(bundled.url, cases, max_tokens=32)) if each.is_finished]
    assert [each for each in finished if not each.is_right] == []
    assert len(finished) > 0.5 * len(cases)


def test_streamed_is_whole(bundled: System, calm: list[Answer]) -> None:
    assert asyncio.run(ask_all(bundled, requests(stream=False))) == calm


def test_kills_change_nothing(bundled: Steered, calm: list[Answer]) -> None:
    """Matchers are made anew from the output so far: the text goes on as it would have."""
    asked = requests(stream=True)
    blows = [lambda: bundled.kill("worker"), lambda: bundled.kill("scheduler")]
    with bundled.struck(blows, steps=8, sequences=sum(fields.get("n", 1) for _, fields in asked)):
        assert asyncio.run(ask_all(bundled, asked)) == calm


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": ".*" * 8000}, "guided_regex"),
        ({"response_format": format_of({"type": "strin"})}, "response_format.json_schema.schema"),
        ({"response_format": format_of({"not": {}})}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"$ref": "http://example.com/a.json"}}}, "structured_outputs.json"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar"),
        ({"structural_tag": {"format": {"type": "tag"}}}, "structural_tag"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_stream_opens(
    bundled: System, fields: dict[str, Any], param: str
) -> None:
    response = httpx.post(
        f"{bundled.url}/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 4, **fields}, timeout=60
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_grammar_that_is_too_dear_per_token_ends_its_request_only(bundled: System) -> None:
    regex = "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"
    dear = {"guided_regex": regex, "max_tokens": 400, "seed": 1, "ignore_eos": True}
    free = {"max_tokens": 24, "seed": 2}

    async def both() -> tuple[httpx.Response, Answer]:
        async with httpx.AsyncClient(base_url=f"{bundled.url}/v1/", timeout=LIMIT_S) as client:
            other = asyncio.create_task(ask(client, "completions", free))
            return await client.post("completions", json=dear | {"prompt": "a"}), await other

    refused, other = asyncio.run(both())
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("guided_regex: ")
    assert other.reasons[0] in ("stop", "length")
