"""Time of the scheduler's fleet with one group: a decode step, an admission, a block. No sockets, no worker.

`python -m benchmarks.scheduler [--json OUT] [--rounds N]`. A step is `handle(GroupResult)` giving the token batch and
the next plan, with two plans in flight. Rows stand at all places of a block in equal shares, so every step has its
share of rows that fill one.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from random import Random

from benchmarks.report import Result, report
from common.columns import pack_i32, unpack_i32
from common.config import Kv, Scheduler
from common.protocol import Abort, Admit, KvGroup, ModelFacts, Sampling, StepPlan, StepResult, WorkerReady, make_seq_id
from services.scheduler.blocks import BlockPool
from services.scheduler.events import FleetEvent, GroupReady, GroupResult, SendPlan
from services.scheduler.fleet import Fleet

CONTEXT = 1024
BLOCK_TOKENS = 16
VOCAB = 50_000
EOS = (0, 2)
GROUP = 7
FULL = KvGroup("full")
KINDS = {  # of layers: those of gpt-oss, Gemma 3 27B and Qwen3-Next
    "window_128": (FULL, KvGroup("window", window=128)),
    "six_windows_1024": (FULL, *[KvGroup("window", window=1024)] * 6),
    "state": (FULL, KvGroup("state", 1, every=4096)),
}


class Bench:
    """A fleet of one group with `rows` running sequences, and the plans it waits for."""

    def __init__(self, rows: int, random: Random, prefixes: int = 0, groups: tuple[KvGroup, ...] = ()) -> None:
        """`prefixes`: how many prompts of CONTEXT tokens the cache can hold beside the rows before it must evict."""
        blocks = (rows + 2) * (2 * CONTEXT // BLOCK_TOKENS) + prefixes * (CONTEXT // BLOCK_TOKENS)
        self.random = random
        self.fleet = Fleet(Scheduler(max_rows=rows + 1, step_tokens=(rows + 1) * CONTEXT), Kv(), seed=1)
        self.plans: list[StepPlan] = []
        self.counter = 0
        blocks *= sum(group.pool == 0 for group in groups) or 1
        states = (4 * rows,) * any(group.pool for group in groups)
        facts = ModelFacts("bench", "bench", VOCAB, 8192, EOS, BLOCK_TOKENS, blocks, groups=groups, pools=states)
        self.handle(GroupReady(GROUP, WorkerReady(facts, rows + 1)))

    def handle(self, *events: FleetEvent) -> None:
        self.plans += [effect.plan for effect in self.fleet.handle(events, 0.0) if isinstance(effect, SendPlan)]

    def admit(self, prompt: bytes, max_tokens: int = CONTEXT) -> Admit:
        self.counter += 1
        return Admit(make_seq_id(0, 0, 1, self.counter), prompt, Sampling(max_tokens=max_tokens))

    def prompt(self, num_tokens: int) -> bytes:
        return pack_i32(self.random.choices(range(3, VOCAB), k=num_tokens))

    def result(self) -> GroupResult:
        """For the oldest plan, tokens that end nothing."""
        plan = self.plans.pop(0)
        return GroupResult(GROUP, StepResult(plan.step, self.prompt(plan.samples.count(1))))

    def settle(self) -> None:
        """Until all plans in flight are plain decode steps of all rows."""
        rows = self.fleet.load().running
        while any(len(plan.slots) != 4 * rows or max(unpack_i32(plan.counts)) > 1 for plan in self.plans):
            self.handle(self.result())


def step_times_us(rows: int, steps: int, random: Random, groups: tuple[KvGroup, ...] = ()) -> list[float]:
    """Times of single decode steps with `rows` rows around CONTEXT tokens."""
    bench = Bench(rows, random, groups=groups)
    lengths = [CONTEXT - steps // 2 + row % BLOCK_TOKENS for row in range(rows)]
    bench.handle(*[bench.admit(bench.prompt(length)) for length in lengths])
    bench.settle()
    bench.fleet.check()
    tokens = [bench.prompt(rows) for _ in range(64)]
    times = []
    handle = bench.fleet.handle
    for step in range(steps):
        events = (GroupResult(GROUP, StepResult(bench.plans.pop(0).step, tokens[step % 64])),)
        start = time.perf_counter()
        effects = handle(events, 0.0)
        times.append((time.perf_counter() - start) * 1e6)
        bench.plans += [effect.plan for effect in effects if isinstance(effect, SendPlan)]
    bench.fleet.check()
    return times


def churn_times_us(rows: int, steps: int, random: Random) -> list[float]:
    """Times of decode steps in which sequences end and new ones start: `rows` rows, outputs of 128 tokens."""
    output = 128
    bench = Bench(rows, random, prefixes=1024)
    waiting = [bench.admit(bench.prompt(CONTEXT), output) for _ in range(rows + (steps + output) * rows // output)]
    tokens = [bench.prompt(2 * rows) for _ in range(64)]
    times = []
    for step in range(steps + output):
        # At first one share of the rows per step, so that ends are spread evenly; later one for each that has ended.
        events: list[FleetEvent] = [waiting.pop() for _ in range(rows // output)]
        if bench.plans:
            plan = bench.plans.pop(0)
            result = StepResult(plan.step, tokens[step % 64][: 4 * plan.samples.count(1)])
            events.insert(0, GroupResult(GROUP, result))
        start = time.perf_counter()
        effects = bench.fleet.handle(events, 0.0)
        times.append((time.perf_counter() - start) * 1e6)
        bench.plans += [effect.plan for effect in effects if isinstance(effect, SendPlan)]
    bench.fleet.check()
    return times[output:]


def admit_times_us(hit: bool, evict: bool, count: int, random: Random) -> list[float]:
    """Times from Admit to the plan that starts the prompt, with nothing else running."""
    bench = Bench(4, random, prefixes=0 if evict else count)
    prompt = bench.prompt(CONTEXT)
    times = []
    for _ in range(count):
        admit = bench.admit(prompt if hit else bench.prompt(CONTEXT), max_tokens=1)
        start = time.perf_counter()
        effects = bench.fleet.handle((admit,), 0.0)
        times.append((time.perf_counter() - start) * 1e6)
        bench.plans += [effect.plan for effect in effects if isinstance(effect, SendPlan)]
        while bench.plans:
            bench.handle(bench.result())
        bench.handle(Abort(admit.seq_id))
    return times[1:]


def block_times_ns(at_once: int, count: int) -> list[float]:
    """Time per block of taking `at_once` blocks and giving them back, in nanoseconds."""
    pool = BlockPool(4096, BLOCK_TOKENS)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        pool.release(pool.allocate(at_once))
        times.append((time.perf_counter() - start) * 1e9 / at_once)
    return times


def median_of(rounds: int, measure: Callable[[], list[float]]) -> tuple[float, str]:
    """Median over all single measurements, and their spread in words."""
    times = sorted(value for _ in range(rounds) for value in measure())
    low, high = times[len(times) // 10], times[len(times) * 9 // 10]
    return statistics.median(times), f"median of {len(times)}, 10-90 % {low:.1f}-{high:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.scheduler", description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement")
    options = parser.parse_args()
    random = Random(1)
    # A scheduler process freezes its heap after start, too.
    gc.freeze()
    results = []
    for rows in (16, 64, 256, 1024):
        value, spread = median_of(options.rounds, partial(step_times_us, rows, 512, random))
        conditions = f"context {CONTEXT}, blocks of {BLOCK_TOKENS}, 2 plans in flight; {spread}"
        results.append(Result(f"scheduler_step_us_{rows}", value, "us", conditions))
    for name, groups in KINDS.items():
        value, spread = median_of(options.rounds, partial(step_times_us, 256, 512, random, groups))
        results.append(
            Result(f"scheduler_step_us_256_{name}", value, "us", f"as above, {len(groups)} groups; {spread}")
        )
    value, spread = median_of(options.rounds, partial(churn_times_us, 256, 512, random))
    conditions = f"as above, but in every step 2 rows end and 2 prompts of {CONTEXT} start; {spread}"
    results.append(Result("scheduler_churn_step_us_256", value, "us", conditions))
    for name, hit, evict, words in (
        ("scheduler_admit_us_1024", False, False, "no prefix hit"),
        ("scheduler_admit_evict_us_1024", False, True, "no prefix hit, 64 cached blocks evicted"),
        ("scheduler_admit_hit_us_1024", True, False, "prefix hit"),
    ):
        value, spread = median_of(options.rounds, partial(admit_times_us, hit, evict, 300, random))
        results.append(Result(name, value, "us", f"{words}, Admit to its first plan; {spread}"))
    for at_once in (1, 64):
        value, spread = median_of(options.rounds, partial(block_times_ns, at_once, 3000))
        conditions = f"allocate and release, {at_once} at once, per block; {spread}"
        results.append(Result(f"scheduler_block_ns_{at_once}", value, "ns", conditions))
    report(results, options.json, "scheduler core")


if __name__ == "__main__":
    main()
