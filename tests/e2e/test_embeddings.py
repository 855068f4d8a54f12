"""/v1/embeddings by OpenAI's client: equal to transformers', beside a stream, in small steps, whole after kills."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from benchmarks.loglikelihood import Reference
from tests.e2e.steered import LIMIT_S, Steered

MODEL = "SmolLM2-135M-Instruct"
CLOSE = 1e-4
IDS = [[504, 3575, 282, 4649, 314], list(range(300, 430)), [7]]
TEXTS = ["The capital of France is Paris. " * 9, "x", "Grüße, 🙂!"]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def narrow() -> Iterator[Steered]:
    """Steps of 32 tokens, so that inputs come in chunks."""
    settings = ("worker.threads=1", "scheduler.step_tokens=32", "scheduler.max_rows=16", "kv.blocks=512")
    with Steered("model.dtype=float32", *settings, "scheduler.max_worker_deaths=9") as system:
        yield system


def wanted(reference: Reference, tokens: list[int], mode: str) -> torch.Tensor:
    hidden = reference.hidden(tokens)
    return torch.nn.functional.normalize(hidden[-1] if mode == "last" else hidden.mean(0), dim=0)


STREAM = 60  # tokens
STEPS = 20  # before a death; far from all is done


async def beside(client: openai.AsyncOpenAI, calls: list[Any]) -> list[Any]:
    """The calls' replies, while a stream runs."""
    asked: Any = {
        "model": MODEL,
        "prompt": "Once",
        "temperature": 0,
        "max_tokens": STREAM,
        "extra_body": {"ignore_eos": True},
    }
    waiting = asyncio.gather(*calls)
    options = {"include_usage": True}
    stream = await client.completions.create(stream=True, stream_options=options, **asked)
    *_, last = [chunk async for chunk in stream]
    assert last.usage is not None and last.usage.completion_tokens == STREAM
    return list(await waiting)


@pytest.mark.parametrize("mode", ["last", "mean"])
def test_equal_to_transformers_in_both_encodings_beside_a_stream(
    narrow: Steered, reference: Reference, mode: str
) -> None:
    async def main() -> tuple[Any, Any, Any]:
        async with openai.AsyncOpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0) as client:
            more: Any = {"model": MODEL, "extra_body": {"pooling": mode}}
            calls = [
                client.embeddings.create(input=IDS, **more),  # asks for base64 by itself
                client.embeddings.create(input=TEXTS, encoding_format="float", **more),
                client.completions.create(
                    model=MODEL, prompt=TEXTS, max_tokens=1, extra_body={"return_token_ids": True}
                ),
            ]
            given, texts, tokens = await beside(client, calls)
            return given, texts, [choice.prompt_token_ids for choice in tokens.choices]

    given, texts, tokens = asyncio.run(main())
    for reply, inputs in ((given, IDS), (texts, tokens)):
        assert [each.index for each in reply.data] == [0, 1, 2]
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, inputs))
        for each, ids in zip(reply.data, inputs, strict=True):
            assert each.embedding == pytest.approx(wanted(reference, ids, mode).tolist(), abs=CLOSE)


@pytest.mark.long
def test_a_worker_that_dies_costs_no_vector(narrow: Steered, reference: Reference) -> None:
    inputs = [list(range(start, start + 150)) for start in range(300, 310)]

    async def main() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0) as client:
            calls = [
                client.embeddings.create(model=MODEL, input=inputs, extra_body={"pooling": mode}) for mode in MODES
            ]
            return await beside(client, calls)

    with narrow.struck([lambda: narrow.kill("worker")], STEPS, sequences=1 + len(MODES) * len(inputs)):
        replies = asyncio.run(main())
    for reply, mode in zip(replies, MODES, strict=True):
        assert [each.index for each in reply.data] == list(range(10))
        for place in (0, 5, 9):
            told = wanted(reference, inputs[place], mode).tolist()
            assert reply.data[place].embedding == pytest.approx(told, abs=CLOSE)


MODES = ("last", "mean")


@pytest.fixture(scope="module")
def lonely() -> Iterator[Steered]:
    """One process of each kind; a null worker, whose vectors are functions of their prompts."""
    with Steered("worker.kind=null", "worker.step_us=20000", "scheduler.step_tokens=16") as system:
        yield system


@pytest.mark.parametrize("service", ["tokenizer", "scheduler", "worker"])
def test_each_input_has_one_vector_whoever_dies(lonely: Steered, service: str) -> None:
    inputs = [[number, *range(300, 320)] for number in range(1, 61)]

    async def main(stream: bool) -> Any:
        async with openai.AsyncOpenAI(base_url=f"{lonely.url}/v1", api_key="none", max_retries=0) as client:
            call = client.embeddings.create(model=MODEL, input=inputs)
            return (await beside(client, [call]))[0] if stream else await call

    with lonely.struck([lambda: lonely.kill(service)], STEPS, sequences=1 + len(inputs)):
        hurt = asyncio.run(main(stream=True))
    whole = asyncio.run(main(stream=False))
    assert [each.embedding for each in hurt.data] == [each.embedding for each in whole.data]
    assert len({tuple(each.embedding) for each in whole.data}) == 60


def test_lines_of_a_batch(lonely: Steered) -> None:
    """As the endpoint answers them; what it refuses is in the file of errors."""
    bodies: list[dict[str, Any]] = [
        {"input": [5, 6, 7], "encoding_format": "float"},
        {"input": [[5, 6, 7], [8]], "encoding_format": "base64"},
        {"input": "a text", "encoding_format": "float", "pooling": "mean"},
        {"input": [5], "embed_dtype": "int8"},
    ]
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL} | body}
        for number, body in enumerate(bodies)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with openai.OpenAI(base_url=f"{lonely.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        end_s = time.monotonic() + LIMIT_S
        while (batch := client.batches.retrieve(made.id)).status in ("validating", "in_progress", "finalizing"):
            assert time.monotonic() < end_s, batch
            time.sleep(0.05)
        assert batch.status == "completed" and batch.output_file_id and batch.error_file_id
        output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
        alone = [client.post("/embeddings", cast_to=object, body={"model": MODEL} | body) for body in bodies[:3]]
    assert [each["custom_id"] for each in output] == ["line-0", "line-1", "line-2"]
    assert [each["response"]["body"] for each in output] == alone
    (refused,) = errors
    assert refused["custom_id"] == "line-3" and refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "embed_dtype"
