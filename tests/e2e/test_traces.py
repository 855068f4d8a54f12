"""One request is one connected trace across real processes, also when its worker dies in the middle."""

from collections.abc import Callable, Iterator

import httpx
import pytest

from benchmarks.system import System
from tests.e2e.steered import LIMIT_S, Steered
from tests.otlp import Collector, Received

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e47", "00f067aa0ba902b7"
MODEL = "SmolLM2-135M-Instruct"
LOCAL = {"llm_request", "queue", "prefill", "decode"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Steered]:
    with Steered("worker.kind=null", "worker.step_us=20000", f"traces.endpoint={collector.endpoint}") as system:
        yield system


def ask(system: System, number: int, flags: str = "01", max_tokens: int = 8) -> httpx.Response:
    headers = {"traceparent": f"00-{TRACE}{number:02x}-{SPAN}-{flags}", "tracestate": "vendor=1"}
    body = {"model": MODEL, "prompt": "hello", "max_tokens": max_tokens}
    return httpx.post(f"{system.url}/v1/completions", json=body, headers=headers, timeout=LIMIT_S)


def of(spans: list[Received], number: int) -> list[Received]:
    return [span for span in spans if span.trace_id == f"{TRACE}{number:02x}"]


def connected(spans: list[Received]) -> bool:
    """Every span's parent is one of them, but for the caller's."""
    return {span.parent_id for span in spans} <= {span.span_id for span in spans} | {SPAN}


def complete(number: int) -> Callable[[list[Received]], bool]:
    def check(spans: list[Received]) -> bool:
        names = [span.name for span in of(spans, number)]
        needed = {"tokenize", f"text_completion {MODEL}", *LOCAL}
        return needed | {"execute"} <= set(names)

    return check


def test_a_request_is_one_connected_trace(traced: System, collector: Collector) -> None:
    reply = ask(traced, 1)
    assert reply.status_code == 200 and reply.headers["tracestate"] == "vendor=1"
    spans = of(collector.until(complete(1)), 1)
    by_name = {span.name: span for span in spans}
    root = by_name[f"text_completion {MODEL}"]
    assert root.parent_id == SPAN and reply.headers["traceparent"] == f"00-{root.trace_id}-{root.span_id}-01"
    assert connected(spans) and {span.state for span in spans} == {"vendor=1"}
    services = {span.name: span.service.removeprefix("valence-") for span in spans}
    assert services == {root.name: "api", "tokenize": "tokenizer", "execute": "worker"} | dict.fromkeys(
        LOCAL, "scheduler"
    )
    request = by_name["llm_request"]
    assert {by_name[name].parent_id for name in ("tokenize", "llm_request")} == {root.span_id}
    assert {by_name[name].parent_id for name in ("queue", "prefill", "decode", "execute")} == {request.span_id}
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert request.attributes["gen_ai.latency.time_in_model_inference"] > 0
    slack_ns = 5_000_000_000  # a loop's clock stands still in a turn, and each process knows the time by itself
    assert all(root.start_ns - slack_ns <= span.start_ns <= span.end_ns <= root.end_ns + slack_ns for span in spans)
    assert not any(span.error for span in spans)


def test_a_request_that_is_not_sampled_leaves_nothing(traced: System, collector: Collector) -> None:
    assert "traceparent" not in ask(traced, 2, flags="00").headers
    ask(traced, 3)
    assert not of(collector.until(complete(3)), 2)


def test_the_trace_stays_connected_when_the_worker_dies(traced: Steered, collector: Collector) -> None:
    with traced.struck([lambda: traced.kill("worker")], steps=20):
        reply = ask(traced, 4, max_tokens=40)
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 40
    spans = of(collector.until(complete(4)), 4)
    assert connected(spans)
    (request,) = (span for span in spans if span.name == "llm_request")
    assert request.attributes["valence.worker_deaths"] == 1
    assert any("worker lost" in event for event in request.events)


def test_a_refused_request_says_why(traced: System, collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}05-{SPAN}-01"}
    reply = httpx.post(f"{traced.url}/v1/completions", json={"model": MODEL}, headers=headers, timeout=60)
    assert reply.status_code == 400 and reply.headers["traceparent"].startswith(f"00-{TRACE}05-")
    (span,) = of(collector.until(lambda spans: bool(of(spans, 5))), 5)
    assert (span.name, span.attributes["http.response.status_code"]) == ("POST /v1/completions", 400)
