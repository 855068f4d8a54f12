"""What a worker's own Python does in a decode step on a GPU, without a GPU: calls, instructions, microseconds.

From a plan's arrival to its result: the engine's part, between the link and the device. The model is tiny, graphs
replay nothing, and what belongs to the device (streams, events, pinned memory) is stood in for; plans are made before.
Calls are Python's and those it makes to C. Instructions are Valgrind's (`--instructions`); times are this machine's.

    python -m benchmarks.host_step --json OUT
    python -m benchmarks.host_step --rows 1 --instructions
    python -m benchmarks.host_step --rows 1 --profile
"""

import argparse
import contextlib
import cProfile
import gc
import os
import pstats
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast
from unittest import mock

import numpy as np
import torch

from benchmarks import models
from benchmarks.report import Result, report
from common import config as configuration
from common.columns import pack_i32
from common.protocol import Admit, Sampling, StepPlan, StepResult, WorkerReady, make_seq_id
from services.scheduler.core import SchedulerCore
from services.scheduler.events import Event, SendPlan
from services.worker import graphs
from services.worker.engine import result_of
from services.worker.graphs import Captured, GraphKey, Graphs, StepInputs, StepOutputs
from services.worker.model_engine import ModelEngine
from services.worker.runner import Runner
from services.worker.staging import offsets

PROMPT, BLOCK = 40, 16
WARM = 24  # decode steps before those that count
TOTALS = re.compile(r"^totals: (\d+)", re.MULTILINE)


class Nothing:
    """An event, a stream, a graph."""

    stream_id = device_index = device_type = 0

    def __init__(self, *given: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def replay(self) -> None: ...

    def query(self) -> bool:
        return True


class StillGraphs(Graphs):
    """What would be captured is not even run."""

    def _capture(self, key: GraphKey, columns: Any, forward: Any, sequel: Any) -> Captured:
        inputs = StepInputs.at(self._place, key, self._tables)
        ids = torch.zeros(key.tokens, dtype=torch.int32)
        made = StepOutputs(torch.zeros(key.rows, 8), torch.zeros(key.rows, dtype=torch.int32), ids, ids)
        graph: Any = Nothing()
        return Captured(graph, self._place[: offsets(columns)[1]], inputs, made)


@contextlib.contextmanager
def device() -> Iterator[None]:
    """torch.cuda as far as a step's host side knows it, on a CPU."""
    unpinned = {name: getattr(torch, name) for name in ("empty", "zeros")}

    def plain(name: str) -> Any:
        return lambda *size, pin_memory=False, **more: unpinned[name](*size, **more)

    stream = Nothing()
    with contextlib.ExitStack() as stack:
        for name in unpinned:
            stack.enter_context(mock.patch.object(torch, name, plain(name)))
        for name, value in {
            "Event": Nothing,
            "Stream": Nothing,
            "current_stream": lambda *_: stream,
            "set_stream": lambda stream: None,
            "stream": lambda stream: contextlib.nullcontext(),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        yield


def make_engine(rows: int, source: str, settings: Sequence[str]) -> ModelEngine:
    wanted = [
        f"model.source={source}",
        "model.weights=random",
        "model.max_len=1024",
        f"scheduler.max_rows={rows}",
        "scheduler.step_tokens=8192",
        "scheduler.chunk_beside=0",
        f"kv.block_tokens={BLOCK}",
        f"kv.blocks={rows * 32 + 72}",
        "worker.device=cpu",
        *settings,
    ]
    config = configuration.load(None, wanted)
    engine = ModelEngine(config, lambda progress: None)
    engine.config = config  # type: ignore[attr-defined]
    as_on_device(engine._runner, rows)
    return engine


def as_on_device(runner: Runner, rows: int) -> None:
    """The runner's way of a GPU: staged inputs, captured steps, block tables that are resident."""
    from services.worker import staging as staged
    from services.worker.runner import STAGED_BYTES

    held, results = runner.rows, cast(Any, runner._results)
    for group in (held.first, *held.beside):
        if not group.is_state:
            group.resident = torch.zeros(rows + 1, group.tables.shape[1], dtype=torch.int32)
    with mock.patch("services.worker.runner.Graphs", StillGraphs), device():
        runner._staging = staged.DeviceStaging(STAGED_BYTES, torch.device("cpu"))
        results._stream = Nothing()
        results._events = [Nothing() for _ in range(staged.RING)]
        runner.capture(graphs.layouts(rows, 512, 8192, 1024), lambda done, total: None)


def make_plans(engine: ModelEngine, rows: int, count: int, temperature: float) -> list[StepPlan]:
    """Those of `rows` requests at once, up to `count` steps in which all of them decode; two in flight."""
    config: Any = engine.config  # type: ignore[attr-defined]
    core = SchedulerCore(config.scheduler, config.kv, seed=1)
    events: list[Event] = [WorkerReady(engine.facts, engine.max_rows)]
    sampling = Sampling(count + 40, temperature=temperature, ignore_eos=True)
    tokens = np.random.default_rng(0).integers(3, 100, (rows, PROMPT), np.int32)
    events += [Admit(make_seq_id(0, 0, 1, 1 + row), pack_i32(tokens[row].tolist()), sampling) for row in range(rows)]
    plans: list[StepPlan] = []
    decodes = answered = 0
    while decodes < count:
        made = [effect.plan for effect in core.handle(events, 0.0) if isinstance(effect, SendPlan)]
        plans += made
        decodes += sum(len(plan.counts) == 4 * rows and set(plan.counts[::4]) == {1} for plan in made)
        plan = plans[answered]
        answered += 1
        events = [StepResult(plan.step, bytes(4 * sum(plan.samples)))]
    return plans


class Calls:
    """Counts calls of Python functions and by them of C functions."""

    def __init__(self) -> None:
        self.python = self.c = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        self.python += event == "call"
        self.c += event == "c_call"


def step(engine: ModelEngine, plan: StepPlan) -> StepResult:
    return result_of(plan.step, engine.execute(plan))


def measure(rows: int, arguments: argparse.Namespace) -> list[Result]:
    count = arguments.steps
    engine = make_engine(rows, models.find_model(arguments.model), arguments.set)
    plans = make_plans(engine, rows, WARM + 2 * count, arguments.temperature)
    name = f"host_step_{rows}"
    conditions = f"{rows} rows, {arguments.model}, temperature {arguments.temperature:g}"
    with device():
        for plan in plans[: -2 * count]:
            step(engine, plan)
        part = plans[-2 * count : -count]
        if arguments.counted:
            return [Result(f"{name}_instructions", instructions(engine, part, arguments.counted), "1", conditions)]
        if arguments.profile:
            profile = cProfile.Profile()
            profile.enable()
            for plan in part:
                step(engine, plan)
            profile.disable()
            pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(45)
            return []
        calls = Calls()
        sys.setprofile(calls)
        for plan in part:
            step(engine, plan)
        sys.setprofile(None)
        gc.collect()
        gc.disable()
        spent = []
        for plan in plans[-count:]:
            start_s = time.perf_counter()
            step(engine, plan)
            spent.append(time.perf_counter() - start_s)
        gc.enable()
    return [
        Result(f"{name}_python_calls", calls.python / count, "1", conditions),
        Result(f"{name}_c_calls", calls.c / count, "1", conditions),
        Result(f"{name}_us", 1e6 * float(np.median(spent)), "us", conditions),
    ]


def instructions(engine: ModelEngine, plans: Sequence[StepPlan], folder: str) -> float:
    """By step; this process runs under callgrind, which writes its counts into `folder`."""

    def ask(*words: str) -> None:
        subprocess.run(["vgdb", f"--pid={os.getpid()}", *words], check=True, capture_output=True)

    def spent(part: Sequence[StepPlan]) -> float:
        ask("dump")
        for plan in part:
            step(engine, plan)
        ask("dump")
        newest = max(Path(folder).glob("counted.*"), key=lambda path: int(path.suffix[1:]))
        found = TOTALS.search(newest.read_text())
        assert found is not None, f"{newest} has no totals"
        return float(found[1])

    gc.disable()
    ask("instrumentation", "on")
    at_rest = spent([])
    return (spent(plans) - at_rest) / len(plans)


def count_instructions(arguments: Sequence[str]) -> None:
    """This program under callgrind, which counts nothing before it is asked to."""
    with tempfile.TemporaryDirectory() as folder:
        tool = ["--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counted"]
        own = [sys.executable, "-P", __file__, *arguments, "--counted", folder]
        subprocess.run(["valgrind", "-q", *tool, *own], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--rows", default="1,16,256", help="sequences that decode [%(default)s]")
    parser.add_argument("--steps", type=int, default=60, help="that are measured [%(default)s]")
    parser.add_argument("--model", default="tiny", help="as in benchmarks.step [%(default)s]")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="settings of the services")
    parser.add_argument("--instructions", action="store_true", help="count them, by Valgrind, and nothing else")
    parser.add_argument("--profile", action="store_true", help="print cProfile's table, and nothing else")
    parser.add_argument("--counted", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.instructions and not given.counted:
        count_instructions(sys.argv[1:])
        return
    torch.set_num_threads(1)
    found = [result for rows in given.rows.split(",") for result in measure(int(rows), given)]
    if found:
        report(found, given.json)


if __name__ == "__main__":
    main()
