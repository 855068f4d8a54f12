"""Two hundred requests as a batch, with kill -9 of every service on the way: each has exactly one result."""

import json
import time
from collections.abc import Iterator
from functools import partial

import openai
import pytest

from tests.e2e.steered import LIMIT_S, Steered

NUM_LINES = 200
STEPS = 10  # before each death: 20 lines, were there no others
SERVICES = ("api", "tokenizer", "worker", "scheduler")


@pytest.fixture
def system() -> Iterator[Steered]:
    """What is proved is the others': the worker's tokens are the null one's, in 16 rows."""
    settings = ("worker.kind=null", "worker.step_us=20000", "scheduler.max_rows=16", "kv.blocks=512")
    with Steered("services.api.replicas=2", *settings, "links.heartbeat_s=0.2") as system:
        yield system


def test_every_request_has_one_result_whoever_dies(system: Steered) -> None:
    lines = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "SmolLM2-135M-Instruct", "prompt": f"{number} ships", "max_tokens": 8, "temperature": 0},
        }
        for number in range(NUM_LINES)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=20, timeout=60) as client:
        system.allow(0)  # until the first of them is to fall
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"why": "test"}
        )
        killed: list[int] = []

        def kill(service: str) -> None:
            process = system.process_of(service)
            killed.append(process.pid)
            process.kill()

        def is_whole(_: int) -> bool:
            processes = system.status()["processes"]
            return all(each["state"] == "ready" and each["pid"] not in killed for each in processes)

        end_s = time.monotonic() + LIMIT_S
        with system.struck([partial(kill, service) for service in SERVICES], STEPS, again=is_whole):
            while (batch := client.batches.retrieve(made.id)).status in ("validating", "in_progress"):
                assert time.monotonic() < end_s, batch
                time.sleep(0.1)
        assert batch.status == "completed" and batch.error_file_id is None and batch.output_file_id
        assert len(killed) == len(SERVICES)
        output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert [each["custom_id"] for each in output] == [line["custom_id"] for line in lines]
        assert {each["response"]["status_code"] for each in output} == {200}
        for number in (0, 77, 199):
            body = lines[number]["body"]
            alone = client.completions.create(**body)  # type: ignore[call-overload]
            assert output[number]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
