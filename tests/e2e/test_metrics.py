"""/metrics of a running system: every name is in docs/metrics.md, and no counter falls whoever dies."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.system import System
from tests.e2e.steered import LIMIT_S

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/metrics.md").read_text()
ROW = re.compile(r"^\| `([\w:]+)` \| (\w+) \| ([\w, ]*) \| .+ \| (.+) \|$", flags=re.MULTILINE)
BODY = {"model": "SmolLM2-135M-Instruct", "prompt": "hi", "max_tokens": 4, "ignore_eos": True}
Counters = dict[str, float]


def page(system: System) -> str:
    return httpx.get(f"{system.url}/metrics", timeout=60).raise_for_status().text


def counters(text: str) -> Counters:
    """Every series that only grows."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type in ("counter", "histogram")
    }


def until(system: System, condition: Callable[[Counters], bool]) -> Counters:
    end_s = time.monotonic() + LIMIT_S
    while not condition(found := counters(page(system))):
        assert time.monotonic() < end_s, "the figures do not come"
        time.sleep(0.05)
    return found


def generated(found: Counters) -> float:
    return sum(value for name, value in found.items() if name.startswith("vllm:generation_tokens_total"))


def answered(found: Counters) -> float:
    return sum(value for name, value in found.items() if name.startswith("vllm:e2e_request_latency_seconds_count"))


def ask(system: System, before: Counters) -> Counters:
    """One more request, until all figures know of it."""
    end_s = time.monotonic() + LIMIT_S
    while (reply := httpx.post(f"{system.url}/v1/completions", json=BODY, timeout=LIMIT_S)).status_code == 503:
        assert time.monotonic() < end_s, reply.text  # one replica may know later than the other that all is there again
    assert reply.status_code == 200, reply.text
    return until(system, lambda now: generated(now) >= generated(before) + 4 and answered(now) >= answered(before) + 1)


def test_the_document_lists_every_name_with_its_type_and_labels(bundled: System) -> None:
    ask(bundled, counters(page(bundled)))
    documented = {name: (kind, labels, by) for name, kind, labels, by in ROW.findall(DOCUMENT)}
    assert len(documented) == len(ROW.findall(DOCUMENT)) > 100
    text = page(bundled)
    families = list(text_string_to_metric_families(text))
    for family in families:
        kind, labels, _ = documented[family.name]
        found = {name for sample in family.samples for name in sample.labels} - {"le"}
        assert (family.type, found) == (kind, set(labels.split(", "))), family.name
    missing = documented.keys() - {family.name for family in families}
    assert [name for name in missing if "with keys" not in documented[name][2]] == []
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    other = httpx.get(f"{bundled.url}/metrics", headers=accept, timeout=60).text
    types = {family.name: family.type for family in openmetrics.text_string_to_metric_families(other)}
    assert {family.name: family.type for family in families}.items() <= types.items()


def test_no_counter_falls_whoever_is_killed(system: System) -> None:
    """Two APIs answer in turn, and each of what counts dies once."""
    before = ask(system, counters(page(system)))
    for service in ("api", "scheduler", "tokenizer", "worker"):
        process = next(p for p in system.status()["processes"] if p["service"] == service)
        os.kill(process["pid"], signal.SIGKILL)
        end_s = time.monotonic() + LIMIT_S
        while not system.ready() or process["pid"] in [p["pid"] for p in system.status()["processes"]]:
            assert time.monotonic() < end_s, f"{service} does not come back"
        now = ask(system, before)
        fallen = {name: (before[name], now.get(name)) for name in before if now.get(name, -1.0) < before[name]}
        assert fallen == {}, f"after the death of {service}"
        assert generated(now) <= generated(before) + 4, "counted twice"
        before = now
