"""Log-probabilities of the bundled model over HTTP: equal to transformers', the same in streams, whole after kills."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from benchmarks.loglikelihood import Reference
from benchmarks.system import System
from tests.e2e.steered import LIMIT_S, Steered

MODEL = "SmolLM2-135M-Instruct"
CLOSE = 1e-3
PROMPT = "The capital of France is"
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def test_output_and_prompt_as_transformers_has_them(client: openai.OpenAI, reference: Reference) -> None:
    more: dict[str, Any] = {"echo": True, "extra_body": {"return_token_ids": True}}
    reply = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=6, logprobs=3, **more)
    (choice,) = reply.choices
    tokens = [*choice.prompt_token_ids, *choice.token_ids]  # type: ignore[attr-defined]
    wanted, told = reference.logprobs(tokens), choice.logprobs
    assert told is not None and told.token_logprobs[0] is None and len(told.tokens) == len(tokens)
    own = [wanted[place, token].item() for place, token in enumerate(tokens[1:])]
    assert told.token_logprobs[1:] == pytest.approx(own, abs=CLOSE)
    for row, best, name in zip(wanted, told.top_logprobs[1:], told.tokens[1:], strict=False):
        highest = sorted(best.values(), reverse=True)
        assert highest[:3] == pytest.approx(row.topk(3).values.tolist(), abs=CLOSE) and name in best
    assert "".join(told.tokens) == choice.text
    assert [choice.text[at:].startswith(name) for at, name in zip(told.text_offset, told.tokens, strict=True)]
    named = {"logprob_token_ids": [7042, 5], "allowed_token_ids": [42], "return_tokens_as_token_ids": True}
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "logprobs": 5, "echo": True}
    columns = client.completions.create(**asked, extra_body=named).choices[0].logprobs
    assert columns is not None and len(columns.top_logprobs[1]) in (5, 6), "the prompt has its best ones"
    assert columns.tokens == [f"token_id:{token}" for token in [*tokens[: len(choice.prompt_token_ids)], 42]]
    last = wanted[len(choice.prompt_token_ids) - 1]  # type: ignore[attr-defined]
    assert columns.top_logprobs[-1] == pytest.approx(
        {f"token_id:{token}": last[token].item() for token in (42, 7042, 5)}, abs=CLOSE
    )


def test_loglikelihoods_as_lm_eval_asks_for_them(client: openai.OpenAI, reference: Reference) -> None:
    """Lists of token ids, of which the ends are continuations; the same once more, when prefixes are cached."""
    pairs = [
        ([504, 3575, 282, 4649, 314], [7042]),
        ([1, 504], [3575, 282, 9000]),
        (list(range(300, 360)), [5, 6, 7, 8]),
    ]
    asked: dict[str, Any] = {"model": MODEL, "prompt": [[*context, *rest] for context, rest in pairs], "seed": 1234}
    wanted = [reference.loglikelihood(context, rest) for context, rest in pairs]
    for limit in (1, 0, 1):
        reply = client.completions.create(**asked, echo=True, logprobs=1, max_tokens=limit, temperature=0)
        for choice, (context, rest), (total, greedy) in zip(reply.choices, pairs, wanted, strict=True):
            columns = choice.logprobs
            assert columns is not None and len(columns.tokens) == len(context) + len(rest) + limit
            end = len(columns.tokens) - limit
            own, best = columns.token_logprobs[len(context) : end], columns.top_logprobs[len(context) : end]
            assert sum(own) == pytest.approx(total, abs=CLOSE)
            assert all(value == max(top.values()) for value, top in zip(own, best, strict=True)) is greedy
        assert reply.usage is not None and reply.usage.completion_tokens == limit * len(pairs)
        assert reply.usage.prompt_tokens_details is not None and not reply.usage.prompt_tokens_details.cached_tokens


def text_stream(client: openai.OpenAI, **asked: Any) -> dict[int, tuple[str, dict[str, list[Any]], str]]:
    found: dict[int, tuple[str, dict[str, list[Any]], str]] = {}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            text, columns, reason = found.get(choice.index, ("", {name: [] for name in COLUMNS}, ""))
            for name in COLUMNS if choice.logprobs else ():
                columns[name] += getattr(choice.logprobs, name)
            found[choice.index] = text + choice.text, columns, reason + (choice.finish_reason or "")
    return found


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "seed": 5, "logprobs": 2, "echo": True},
        {"stop": ["\n", "ris"], "logprobs": 0, "temperature": 0},
        {"prompt": "🙂🙃🙂🙃🙂", "logprobs": 1, "temperature": 0, "echo": True},
        {"max_tokens": 0, "logprobs": 1, "echo": True},
    ],
    ids=["choices", "stop", "characters", "no output"],
)
def test_a_stream_of_a_completion_says_the_same(client: openai.OpenAI, more: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12} | more
    whole = client.completions.create(**asked)
    streamed = text_stream(client, **asked)
    for choice in whole.choices:
        assert choice.logprobs is not None
        text, columns, reason = streamed[choice.index]
        assert (text, reason) == (choice.text, choice.finish_reason)
        assert columns["tokens"] == choice.logprobs.tokens and columns["text_offset"] == choice.logprobs.text_offset
        for name, wanted in (
            ("token_logprobs", choice.logprobs.token_logprobs),
            ("top_logprobs", choice.logprobs.top_logprobs),
        ):
            for ours, theirs in zip(columns[name], wanted, strict=True):
                assert ours == (None if theirs is None else pytest.approx(theirs, abs=CLOSE))


def test_a_stream_of_a_chat_says_the_same(client: openai.OpenAI) -> None:
    talk = [{"role": "user", "content": "Repeat: 🙂 naïve 🇫🇷"}]
    asked: dict[str, Any] = {"model": MODEL, "messages": talk, "temperature": 0, "max_tokens": 16}
    asked |= {"logprobs": True, "top_logprobs": 3}
    (whole,) = client.chat.completions.create(**asked).choices
    assert whole.logprobs is not None and whole.logprobs.content is not None
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        told = chunk.choices[0].logprobs
        streamed += (told.content or []) if told is not None else []
    told = whole.logprobs.content
    assert [(entry.token, entry.bytes) for entry in streamed] == [(entry.token, entry.bytes) for entry in told]
    for ours, theirs in zip(streamed, told, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=CLOSE)
        assert [best.token for best in ours.top_logprobs] == [best.token for best in theirs.top_logprobs]
    text = b"".join(bytes(entry.bytes or b"") for entry in streamed).decode("utf-8", "replace")
    assert whole.message.content is not None and text.startswith(whole.message.content[:-1])
    assert {len(entry.top_logprobs) for entry in streamed} == {3}


def test_a_response_has_those_of_its_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0}
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "Say: 🙂"}], max_tokens=8, logprobs=True, top_logprobs=2, **asked
    )
    asked |= {
        "input": "Say: 🙂",
        "max_output_tokens": 8,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = client.responses.create(**asked)
    *events, last = client.responses.create(**asked, stream=True)
    deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert [each.logprob for each in deltas] == [each.logprob for each in last.response.output[0].content[0].logprobs]
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content
    for response in (whole, last.response):
        (part,) = response.output[0].content
        assert part.text == chat.choices[0].message.content and part.logprobs
        for ours, theirs in zip(part.logprobs, chat.choices[0].logprobs.content, strict=False):
            assert ours.token == theirs.token and ours.logprob == pytest.approx(theirs.logprob, abs=CLOSE)
            assert [best.token for best in ours.top_logprobs] == [best.token for best in theirs.top_logprobs]


def test_a_grammar_s_tokens_have_those_before_its_mask(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    reply = client.completions.create(**asked, extra_body={"guided_choice": ["zebra 42", "zebra 43"]})
    told = reply.choices[0].logprobs
    assert told is not None and told.token_logprobs and told.top_logprobs
    assert "".join(told.tokens).startswith("zebra 4")
    assert told.token_logprobs[0] < max(told.top_logprobs[0].values()) - 1, "the model would have said something else"


@pytest.fixture(scope="module")
def lonely() -> Iterator[Steered]:
    """One process of each kind; each token of the null worker is another one than that before it."""
    with Steered("worker.kind=null", "worker.step_us=20000") as system:
        yield system


async def events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", "completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event["error"]
                yield event


async def collect(system: System, bodies: list[dict[str, Any]]) -> list[Any]:
    """Text and joined columns of each request."""

    async def one(body: dict[str, Any]) -> Any:
        text, columns = "", dict[str, list[Any]]({name: [] for name in COLUMNS})
        async for event in events(client, body):
            (choice,) = event["choices"]
            text += choice["text"]
            for name in COLUMNS if choice["logprobs"] else ():
                columns[name] += choice["logprobs"][name]
        return text, columns

    async with httpx.AsyncClient(base_url=f"{system.url}/v1/", timeout=LIMIT_S) as client:
        return list(await asyncio.gather(*map(one, bodies)))


def raw(name: str) -> bytes:
    """A token by its name."""
    return bytes.fromhex(name[6:].replace("\\x", "")) if name.startswith("bytes:") else name.encode()


@pytest.mark.parametrize("service", ["tokenizer", "scheduler", "worker"])
def test_none_is_lost_or_doubled_when_a_service_dies(lonely: Steered, service: str) -> None:
    common: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True, "echo": True}
    bodies = [common | {"logprobs": number} for number in range(4)]

    with lonely.struck([lambda: lonely.kill(service)], steps=20, sequences=len(bodies)):
        found = asyncio.run(collect(lonely, bodies))
    for text, columns in found:
        tokens = columns["tokens"]
        assert len(tokens) == 65 and b"".join(map(raw, tokens)).decode("utf-8", "replace") == text
        whole = [(at, name) for at, name in zip(columns["text_offset"], tokens, strict=True) if "bytes:" not in name]
        assert len(whole) > 40 and all(text[at:].startswith(name) for at, name in whole)
        assert columns["token_logprobs"] == [None] + [-0.5] * 64
