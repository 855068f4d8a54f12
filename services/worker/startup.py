"""From a loaded model to a runner that has run everything once: compiled, measured, captured. Called by the engine.

On a GPU: kernels are compiled by running every kind of step with a small cache, the largest steps are measured, the
rest of the memory becomes the KV cache, decode steps are captured. On a CPU a share of free memory becomes the cache.
The stages are what WorkerReady waits for; each is reported as it runs.
"""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from common import env
from common.config import Config
from common.errors import ConfigError
from common.protocol import Progress, StepPlan
from services.worker import compile as levels
from services.worker import graphs, memory, warmup
from services.worker.builders import cache_root
from services.worker.compile_cache import CompileCache, content_key
from services.worker.grammars import Grammars
from services.worker.group import Group
from services.worker.kernels.gpu_arch import arch_of
from services.worker.kernels.registry import Bindings
from services.worker.layers.decoder import Decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.rope import RopeTable
from services.worker.runner import Runner
from services.worker.shortage import is_out_of_memory
from services.worker.state import Rows

log = logging.getLogger("worker")


class Parts(NamedTuple):
    """What runners are made of, whatever the size of their cache."""

    model: Decoder
    bindings: Bindings
    rope: RopeTable
    shape: memory.Shape
    eos_ids: tuple[int, ...]
    device: torch.device
    kv_dtype: torch.dtype
    group: Group | None = None  # of several ranks, of which this process is one
    grammars: Grammars | None = None

    def agreed(self, num_blocks: int) -> int:
        """What all ranks have room for: they share one block table."""
        return num_blocks if self.group is None else self.group.least(num_blocks)

    @property
    def block_bytes(self) -> int:
        return math.prod(KvCache.shape(self.model.spec, 1, self.shape.block_tokens)) * self.kv_dtype.itemsize

    def runner(self, num_blocks: int) -> Runner:
        rows = Rows(self.shape, self.model.spec.vocab_size, self.eos_ids, self.device)
        cache_shape = KvCache.shape(self.model.spec, num_blocks, self.shape.block_tokens)
        cache = KvCache(memory.zeros(cache_shape, self.kv_dtype, self.device), layout=self.bindings.layout)
        return Runner(self.model, rows, cache, self.rope, self.bindings, self.grammars)


class Stages:
    """Passes progress on, and keeps how long each stage took."""

    def __init__(self, report: Callable[[Progress], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._report = report
        self._stage = ""
        self._since_s = time.perf_counter()

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        if stage != self._stage:
            self.end()
            self._stage = stage
        self._report(Progress(stage, done, total))

    def end(self) -> None:
        now_s = time.perf_counter()
        if self._stage:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now_s - self._since_s
        self._stage, self._since_s = "", now_s


def run_all(runner: Runner, plans: Iterable[StepPlan], stage: Callable[[int, int], None]) -> None:
    """Each plan on rows of its own."""
    plans = list(plans)
    for done, plan in enumerate(plans):
        stage(done, len(plans))
        runner.execute(plan).tokens()
        runner.reset()


def measure(parts: Parts, sizes: warmup.Sizes, keys: Sequence[graphs.GraphKey], stages: Stages) -> memory.Readings:
    """Runs the largest steps with a small cache. Whatever these kinds of steps need is compiled by then."""
    meter = memory.Meter(parts.device)
    weights = meter.restart()
    probe = parts.runner(sizes.num_blocks + 1)
    plans = list(warmup.all_kinds(sizes))

    def compiling(done: int, total: int) -> None:
        stages("compile", done, total)

    levels.build_ahead(parts.bindings, partial(run_all, probe, plans, lambda done, total: None), compiling)
    run_all(probe, plans, compiling)
    stages("memory")
    meter.restart()
    run_all(probe, warmup.largest_steps(sizes), lambda done, total: stages("memory", done, total))
    peak = meter.peak()
    captured = 0
    if keys:
        # graphs share the tensors of the largest one
        held = meter.restart()
        run_all(probe, warmup.captured_steps(sizes, keys), lambda done, total: stages("memory"))
        captured = meter.peak() - held + len(keys) * memory.GRAPH_BYTES
    total, others = meter.total_and_others()
    activations = peak - weights - (sizes.num_blocks + 1) * parts.block_bytes
    del probe
    gc.collect()  # its buffers must be gone before the cache takes the rest
    meter.restart()
    return memory.Readings(total, others, weights, activations, captured)


def open_cache(config: Config, model: Mapping[str, Any], device: torch.device) -> CompileCache:
    """From now on what is compiled is kept there. `model`: its configuration."""
    kept = CompileCache(cache_root(config) / "kernels", content_key(arch_of(device), model))
    log.info("compiled kernels are kept in %s", kept.folder)
    env.keep_compiled_in(kept.folder)
    return kept


def start(parts: Parts, config: Config, level: int, stages: Stages) -> tuple[Runner, int]:
    """The runner, warm, with as many KV blocks as fit, and how many the scheduler may use. Raises ConfigError."""
    level = level if parts.model.compiles else levels.EAGER
    if levels.is_worth_compiling(level, parts.bindings):
        stages("compile")
        parts.model.pieces = levels.compile_pieces(level, parts.model)
    sizes = warmup.Sizes(parts.shape, config.scheduler.step_tokens, config.scheduler.chunk_tokens)
    wanted = config.kv.blocks, config.kv.memory_gib
    if parts.device.type == "cpu":
        stages("memory")
        free_bytes = memory.cpu_free_bytes() // (config.services.worker.replicas * config.worker.tensor_parallel)
        budget = memory.choose_blocks(parts.block_bytes, parts.shape, memory.Limits(*wanted, free_bytes))
        log.info("%s", budget.text)
        num_blocks = parts.agreed(budget.num_blocks)
        runner = parts.runner(num_blocks)
        run_all(runner, warmup.first_steps(sizes), lambda done, total: stages("compile", done, total))
        return runner, num_blocks
    limit = config.worker.max_graph_rows if level == levels.CAPTURED else 0
    wanted_graphs = graphs.layouts(parts.shape.max_rows, limit, sizes.step_tokens, parts.shape.max_len)
    with explained("the largest step", "lower scheduler.step_tokens or scheduler.max_rows"):
        readings = measure(parts, sizes, wanted_graphs, stages)
    limits = memory.Limits(*wanted, memory.for_cache(readings, config.kv.gpu_memory_utilization), readings.left)
    # one block more than the scheduler knows: what pads a captured batch is written there
    budget = memory.choose_blocks(parts.block_bytes, parts.shape, limits, spare=1)
    log.info("%s", budget.text)
    num_blocks = parts.agreed(budget.num_blocks)
    log.info("%s", memory.table(readings, (num_blocks + 1) * parts.block_bytes))
    runner = parts.runner(num_blocks + 1)
    run_all(runner, warmup.first_steps(sizes), lambda done, total: stages("memory", done, total))
    if wanted_graphs:
        with explained("the captured graphs", "lower kv.gpu_memory_utilization or worker.max_graph_rows"):
            runner.capture(wanted_graphs, lambda done, total: stages("capture", done, total))
    return runner, num_blocks


@contextmanager
def explained(what: str, advice: str) -> Iterator[None]:
    """The lack of memory at start is the configuration's fault."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        text = str(error).partition("\n")[0]
        raise ConfigError(f"the device has not enough memory for {what}: {advice} ({text})") from error


class Figures:
    """A start-up as a line of the log and as metrics, with what was compiled in spite of it."""

    def __init__(self, seconds: Mapping[str, float], total_s: float) -> None:
        self._built = built = levels.builds()
        stages = ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items())
        log.info(
            "ready after %.1f s (%s); kernels: %d compiled, %d found", total_s, stages, built.compiled, built.found
        )
        self._fixed = {
            "startup_seconds": total_s,
            **{
                f"startup_{stage}_seconds": seconds.get(stage, 0.0)
                for stage in ("weights", "compile", "memory", "capture")
            },
            "kernels_compiled": float(built.compiled),
            "kernels_found": float(built.found),
        }

    def __call__(self) -> dict[str, float]:
        return self._fixed | {"kernels_late": float(levels.builds().compiled - self._built.compiled)}
