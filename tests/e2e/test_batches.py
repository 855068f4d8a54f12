"""Two hundred requests as a batch, with kill -9 of every service on the way: each has exactly one result."""

import contextlib
import json
import time
from collections.abc import Iterator

import openai
import psutil
import pytest

from benchmarks.system import System

NUM_LINES = 200
LIMIT_S = 240
SERVICES = ("api", "tokenizer", "worker", "scheduler")


@pytest.fixture
def system() -> Iterator[System]:
    """What is proved is the others': the worker's tokens are the null one's, 16 rows at 5 steps a second."""
    settings = ("worker.kind=null", "worker.step_us=200000", "scheduler.max_rows=16", "kv.blocks=512")
    with System("services.api.replicas=2", *settings, "links.heartbeat_s=0.2") as system:
        yield system


def test_every_request_has_one_result_whoever_dies(system: System) -> None:
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
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"why": "test"}
        )
        killed: list[str] = []
        end_s = time.monotonic() + LIMIT_S
        while (batch := client.batches.retrieve(made.id)).status in ("validating", "in_progress"):
            assert time.monotonic() < end_s, batch
            counts = batch.request_counts
            if counts and len(killed) < len(SERVICES) and counts.completed > len(killed) * NUM_LINES // 6:
                kill(system, SERVICES[len(killed)])
                killed.append(SERVICES[len(killed)])
            time.sleep(0.1)
        assert batch.status == "completed" and batch.error_file_id is None and batch.output_file_id
        assert tuple(killed) == SERVICES
        output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert [each["custom_id"] for each in output] == [line["custom_id"] for line in lines]
        assert {each["response"]["status_code"] for each in output} == {200}
        for number in (0, 77, 199):
            body = lines[number]["body"]
            alone = client.completions.create(**body)  # type: ignore[call-overload]
            assert output[number]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text


def kill(system: System, service: str) -> None:
    """kill -9 of the first replica. At once: the rest of the batch goes on meanwhile."""
    while True:
        for process in psutil.Process(system.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if f"services.{service}" in process.cmdline():
                    process.kill()
                    return
        time.sleep(0.02)
