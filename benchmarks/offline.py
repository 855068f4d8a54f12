"""The model engine and the scheduler core in one process, without sockets: what the GPU and the host need for a step.

`Offline` drives them as the processes do: as many plans in flight as configured, each result handed to the core before
the next one is awaited. It measures where the host's time goes; in the real system the core has a process of its own.
"""

import atexit
import gc
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import astuple
from rich.console import Console

from benchmarks.report import GateRed
from benchmarks.workloads import Ask
from common.columns import pack_i32
from common.config import Config
from common.protocol import Abort, Admit, FinishReason, Progress, Sampling, StepResult, WorkerReady, make_seq_id
from services.scheduler.core import SchedulerCore
from services.scheduler.events import Event, SendPlan, SendRefused, SendTokens, WorkerFault
from services.worker.engine import Engine, Pending, result_of
from services.worker.model_engine import ModelEngine
from services.worker.ranks import lead
from valence.display import Stage, StartDisplay


class Host(NamedTuple):
    """Seconds of the host in one step."""

    core_s: float  # scheduler: results in, plan out
    execute_s: float  # worker: starts the step
    wait_s: float  # for the device; 0: the host is the limit


class Run(NamedTuple):
    """`step_s`: when each result came, since the start; `step_tokens`: how many tokens it held."""

    wall_s: float
    prompt_tokens: int
    output_tokens: int
    step_s: list[float]
    step_tokens: list[int]
    hosts: list[Host]
    outputs: list[list[int]]  # by request

    def decode_ms(self) -> float:
        """From the first result to the last, by the steps after the first."""
        return 1000 * (self.step_s[-1] - self.step_s[0]) / (len(self.step_s) - 1)

    def full_step_ms(self) -> float:
        """Median time between results of steps that gave a token to every request."""
        gaps = [
            later - sooner
            for sooner, later, count in zip(self.step_s, self.step_s[1:], self.step_tokens[1:], strict=False)
            if count == len(self.outputs)
        ]
        return 1000 * float(np.median(gaps)) if gaps else float("nan")

    def host_us(self) -> tuple[float, float, float]:
        """Medians of core, execute and wait."""
        core, execute, wait = np.median(np.array(self.hosts), axis=0) * 1e6
        return float(core), float(execute), float(wait)


class Offline:
    def __init__(self, config: Config) -> None:
        self._started_s = time.perf_counter()
        self._stage = ("", self._started_s)
        self._display = StartDisplay(Console(stderr=True, highlight=False))
        self.stages_s: dict[str, float] = {}
        with self._display:
            self.engine: Engine = (lead if config.worker.tensor_parallel > 1 else ModelEngine)(config, self._report)
            atexit.register(self.engine.close)
            self._report(Progress(""))
        self.ready_s = time.perf_counter() - self._started_s
        self.core = SchedulerCore(config.scheduler, config.kv, seed=1)
        self._in_flight: deque[tuple[int, Pending]] = deque()
        self._counter = 0
        self._batches: list[SendTokens] = []
        self._handle([WorkerReady(self.engine.facts, self.engine.max_rows)])

    def _report(self, progress: Progress) -> None:
        """Adds the time since the last stage began to it, and says so: a start that is cut off says how far it came."""
        stage, since_s = self._stage
        now_s = time.perf_counter()
        if stage != progress.stage:
            if stage:
                self.stages_s[stage] = self.stages_s.get(stage, 0.0) + now_s - since_s
                if not self._display.console.is_terminal:
                    self._display.console.print(f"    {now_s - since_s:.1f} s, {now_s - self._started_s:.1f} in all")
            self._stage = (progress.stage, now_s)
        self._display.show([Stage(*astuple(progress))] if progress.stage else [])

    def run(self, asks: Sequence[Ask]) -> Run:
        """All requests at once, greedy, to their exact lengths. Raises GateRed if one ends otherwise."""
        events, seq_ids = self._admit(asks)
        gc.collect()
        gc.disable()
        hosts, step_s, step_tokens = [], [], []
        start_s = time.perf_counter()
        while True:
            began_s = time.perf_counter()
            execute_s = self._handle(events)
            started_s = time.perf_counter()
            if not self._in_flight:
                break
            result = self._result()
            now_s = time.perf_counter()
            hosts.append(Host(started_s - began_s - execute_s, execute_s, now_s - started_s))
            if result.tokens:
                step_s.append(now_s - start_s)
                step_tokens.append(len(result.tokens) // 4)
            events = [result]
        wall_s = time.perf_counter() - start_s
        gc.enable()
        outputs = self._outputs(seq_ids)
        for ask, output in zip(asks, outputs, strict=True):
            if len(output) != ask.output_tokens:
                raise GateRed(f"{ask.output_tokens} tokens were asked for, {len(output)} came")
        prompt_tokens = sum(len(ask.prompt) for ask in asks)
        return Run(wall_s, prompt_tokens, sum(map(len, outputs)), step_s, step_tokens, hosts, outputs)

    def begin(self, asks: Sequence[Ask], most_steps: int) -> list[int]:
        """Starts requests and steps until each has a token, at most `most_steps`; for `steps`. Returns their ids."""
        events, seq_ids = self._admit(asks)
        self._handle(events)
        for _ in range(most_steps):
            begun = sum(np.frombuffer(effect.batch.first_index, np.int32).tolist().count(0) for effect in self._batches)
            if begun >= len(asks):
                break
            self._handle([self._result()])
        return seq_ids

    def steps(self, count: int) -> float:
        """Steps on; returns the seconds from a result to the one `count` results later."""
        for _ in range(2):
            self._handle([self._result()])
        start_s = time.perf_counter()
        for _ in range(count):
            self._handle([self._result()])
        return time.perf_counter() - start_s

    def end(self, seq_ids: Sequence[int]) -> None:
        """Aborts what `begin` started."""
        self._handle([Abort(seq_id) for seq_id in seq_ids])
        while self._in_flight:
            self._handle([self._result()])
        self._batches.clear()

    def _admit(self, asks: Sequence[Ask]) -> tuple[list[Event], list[int]]:
        events: list[Event] = []
        seq_ids = []
        for ask in asks:
            self._counter += 1
            seq_ids.append(make_seq_id(0, 0, 1, self._counter))
            sampling = Sampling(ask.output_tokens, temperature=0.0, ignore_eos=True)
            events.append(Admit(seq_ids[-1], pack_i32(ask.prompt.tolist()), sampling))
        return events, seq_ids

    def _handle(self, events: Sequence[Event]) -> float:
        """One turn of the core; starts its plans. Returns the seconds that starting them took."""
        execute_s = 0.0
        for effect in self.core.handle(events, time.perf_counter()):
            if isinstance(effect, SendPlan):
                began_s = time.perf_counter()
                self._in_flight.append((effect.plan.step, self.engine.execute(effect.plan)))
                execute_s += time.perf_counter() - began_s
            elif isinstance(effect, SendTokens):
                self._batches.append(effect)
            elif isinstance(effect, SendRefused):
                raise GateRed(effect.refused.message)
            elif isinstance(effect, WorkerFault):
                raise GateRed(effect.reason)
        return execute_s

    def _result(self) -> StepResult:
        step, pending = self._in_flight.popleft()
        return result_of(step, pending)

    def _outputs(self, seq_ids: Sequence[int]) -> list[list[int]]:
        """Tokens by request, in order. Raises GateRed if one did not end at its length."""
        found: dict[int, list[int]] = {seq_id: [] for seq_id in seq_ids}
        for effect in self._batches:
            batch = effect.batch
            ids, tokens = np.frombuffer(batch.seq_ids, np.uint64).tolist(), np.frombuffer(batch.tokens, np.int32)
            for seq_id, token in zip(ids, tokens.tolist(), strict=True):
                found[seq_id].append(token)
            for finished in batch.finished:
                if finished.reason is not FinishReason.LENGTH:
                    raise GateRed(f"a request ended with {finished.reason.name}: {finished.message}")
        self._batches.clear()
        return list(found.values())
