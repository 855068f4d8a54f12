"""What the split into processes costs, with a worker that computes nothing.

Two parts: tokens per second and processor time through all four services, with the client on the same cores; and the
time that scheduler and links add to a step, measured by a worker that answers each plan at once.

    python -m benchmarks.chain --json chain.json
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.load import stream_all
from benchmarks.report import Result, report
from benchmarks.system import System, cpu_seconds
from common.columns import pack_i32
from common.protocol import (
    Admit,
    Heartbeat,
    Hello,
    Members,
    ModelFacts,
    Peer,
    Sampling,
    StepPlan,
    StepResult,
    ToTokenizer,
    ToWorker,
    WorkerReady,
    make_seq_id,
)
from common.transport import Inbox, LinkCounters, Push


def body(model: str, max_tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": "hello there", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}


def through_all_services(streams: int, tokens: int, settings: Sequence[str] = ()) -> list[Result]:
    """Output tokens per second and CPU seconds per 1,000 tokens, median of three runs."""
    rates, costs, events = [], [], []
    with System("worker.kind=null", "worker.step_us=0", "scheduler.max_rows=512", *settings) as system:
        processes = system.processes()
        model = system.status()["model"]
        stream_all(system.port, "/v1/completions", [body(model, 32)] * streams)
        for _ in range(3):
            before, own = cpu_seconds(processes), resource.getrusage(resource.RUSAGE_SELF)
            start_s = time.perf_counter()
            results = stream_all(system.port, "/v1/completions", [body(model, tokens)] * streams)
            elapsed_s = time.perf_counter() - start_s
            total = sum(result.output_tokens for result in results)
            after, own_after = cpu_seconds(processes), resource.getrusage(resource.RUSAGE_SELF)
            cost = {name: (after[name] - before[name]) / total * 1000 for name in before}
            cost["client"] = (own_after.ru_utime + own_after.ru_stime - own.ru_utime - own.ru_stime) / total * 1000
            rates.append(total / elapsed_s)
            costs.append(cost)
            events.append(sum(result.num_events for result in results) / total)
    conditions = f"{streams} streams of {tokens} tokens, null worker, client on the same {os.cpu_count()} cores"
    found = [Result(f"chain_tokens_per_s_{streams}", statistics.median(rates), "tokens/s", conditions)]
    for name in costs[0]:
        value = statistics.median(cost[name] for cost in costs)
        found.append(Result(f"chain_cpu_s_per_1000_tokens_{name}", value, "s", conditions))
    services = [sum(value for name, value in cost.items() if name != "client") for cost in costs]
    found.append(Result("chain_cpu_s_per_1000_tokens_services", statistics.median(services), "s", conditions))
    found.append(Result(f"chain_events_per_token_{streams}", statistics.median(events), "1", conditions))
    return found


class LoneScheduler:
    """A real scheduler process; this process plays its tokenizer and its worker."""

    def __init__(self, run_dir: str) -> None:
        settings = [f"links.run_dir={run_dir}", "scheduler.plans_in_flight=1"]
        command = [sys.executable, "-m", "services.scheduler", *[f"--set={setting}" for setting in settings]]
        self.process = subprocess.Popen(command)
        endpoint = f"ipc://{run_dir}/scheduler"
        counters = LinkCounters()
        self.tokenizer: Inbox[ToTokenizer] = Inbox(f"ipc://{run_dir}/t", ToTokenizer, 10_000, counters)
        self.worker: Inbox[ToWorker] = Inbox(f"ipc://{run_dir}/w", ToWorker, 10_000, counters)
        self.from_tokenizer = Push(endpoint, 2, 10_000, counters)
        self.from_worker = Push(endpoint, 3, 10_000, counters)
        self.from_tokenizer.send(Hello(Peer("tokenizer", 0, 2, self.tokenizer.endpoint), ""))
        self.from_worker.send(Hello(Peer("worker", 0, 3, self.worker.endpoint), ""))
        self.worker.wait(30)
        facts = ModelFacts("null", "null", 1000, 100_000, (), 16, 60_000)
        self.from_worker.send(WorkerReady(facts, 512))
        while not any(isinstance(m, Members) and m.model for _, m in self.worker.drain()):
            self.worker.wait(1)

    def next_plan(self) -> StepPlan:
        while True:
            self.worker.wait(10)
            for _, message in self.worker.drain():
                if isinstance(message, StepPlan):
                    return message

    def added_latency_us(self, rows: int, steps: int) -> float:
        """Median time from sending a step's result to holding the next plan."""
        sampling = Sampling(max_tokens=50_000)
        for row in range(rows):
            prompt = pack_i32([row % 900 + 1] * (1 + row % 16))
            self.from_tokenizer.send(Admit(make_seq_id(0, 0, 1, row), prompt, sampling))
        times: list[float] = []
        plan = self.next_plan()
        beat_s = time.monotonic()
        while len(times) < steps:
            start_s = time.perf_counter()
            self.from_worker.send(StepResult(plan.step, pack_i32([7] * plan.samples.count(1))))
            plan = self.next_plan()
            if len(plan.samples) == rows and not plan.added:
                times.append(time.perf_counter() - start_s)
            self.tokenizer.drain()
            if time.monotonic() - beat_s > 0.5:
                beat_s = time.monotonic()
                self.from_tokenizer.send(Heartbeat("ready", 0))
                self.from_worker.send(Heartbeat("ready", 0))
        return statistics.median(times) * 1e6

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for part in (self.from_tokenizer, self.from_worker, self.tokenizer, self.worker):
            part.close()


def added_latency(rows: int, steps: int) -> Result:
    with tempfile.TemporaryDirectory(prefix="valence-") as run_dir:
        scheduler = LoneScheduler(run_dir)
        try:
            value = scheduler.added_latency_us(rows, steps)
        finally:
            scheduler.end()
    conditions = f"{rows} decoding rows, one plan in flight, ipc, median of {steps} steps"
    return Result(f"chain_added_us_per_step_{rows}", value, "us", conditions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="setting of the whole system")
    arguments = parser.parse_args()
    results = [added_latency(rows, arguments.steps) for rows in (1, 256)]
    results += through_all_services(arguments.streams, arguments.tokens, arguments.set)
    report(results, arguments.json)


if __name__ == "__main__":
    main()
