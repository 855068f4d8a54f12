"""From a loaded model to a runner that has run everything once: compiled, measured, captured. Called by the engine.

On a GPU: kernels are compiled by running every kind of step with a small cache, the largest steps are measured, the
rest of the memory becomes the KV cache, decode steps are captured. On a CPU a share of free memory becomes the cache.
The stages are what WorkerReady waits for; each is reported as it runs.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from common import env
from common.config import Config
from common.errors import ConfigError
from common.protocol import KvGroup, Progress, StepPlan
from services.worker import compile as levels
from services.worker import graphs, memory, warmup
from services.worker.builders import cache_root
from services.worker.compile_cache import CompileCache, content_key
from services.worker.draft_state import DraftState
from services.worker.drafting import Drafting, Site
from services.worker.grammars import Grammars
from services.worker.group import Group
from services.worker.groups import Layout, Storage
from services.worker.kernels.gpu_arch import arch_of
from services.worker.kernels.registry import Bindings
from services.worker.layers.decoder import Decoder
from services.worker.layers.kv_cache import GroupedCache
from services.worker.layers.kv_scales import KvScales
from services.worker.layers.latent_attention import most_captured
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
    checkpoint_tokens: int = 0  # kv.checkpoint_tokens
    kv_scales: KvScales = KvScales()  # of 8-bit keys and values
    drafting: Drafting | None = None
    grammars: Grammars | None = None

    @property
    def layout(self) -> Layout:
        return self.model.layout(self.shape.block_tokens, self.storage, self.checkpoint_tokens)

    @property
    def storage(self) -> Storage:
        return Storage(self.kv_dtype, self.model.final_norm.weight.dtype, self.kv_scales.each)

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """As in ModelFacts."""
        return () if self.layout.is_plain else self.layout.groups

    def agreed(self, pools: Sequence[int]) -> tuple[int, ...]:
        """What all ranks have room for: they share their block tables."""
        return tuple(pools if self.group is None else map(self.group.least, pools))

    @property
    def pool_bytes(self) -> tuple[int, ...]:
        """Of a block of each pool."""
        first, *others = self.layout.block_bytes(self.shape.block_tokens, self.storage)
        return first + (self.drafting.block_bytes if self.drafting is not None else 0), *others

    def cache_bytes(self, pools: Sequence[int]) -> int:
        return sum(blocks * each for blocks, each in zip(pools, self.pool_bytes, strict=True))

    def fewest_pages(self, pools: Sequence[int]) -> int:
        """Blocks of the smallest pool of pages."""
        return min(pools[self.layout.groups[group].pool] for group in self.layout.pages)

    def small(self, sizes: warmup.Sizes, spare: int = 0) -> tuple[int, ...]:
        """Blocks of pools in which the plans of a start can run."""
        states = {group.pool for group in self.layout.groups if group.kind == "state"}
        count = len(self.layout.pools)
        return tuple((sizes.num_states if pool in states else sizes.num_blocks) + spare for pool in range(count))

    def runner(self, pools: Sequence[int]) -> Runner:
        """`pools`: blocks of each."""
        drafting = self.drafting
        state = DraftState(self.shape.max_rows, drafting.tokens, self.device) if drafting is not None else None
        rows = Rows(self.shape, self.model.spec.vocab_size, self.eos_ids, self.device, self.groups, state)
        given = self.shape.block_tokens, self.storage, self.device, self.bindings.layout, self.kv_scales
        cache = GroupedCache(self.layout, pools, *given)
        drafts = None
        if drafting is not None:
            drafts = drafting.make(Site(self.model, cache, self.rope, self.bindings))
        return Runner(self.model, rows, cache, self.rope, self.bindings, drafts, self.grammars)


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
    pools = parts.small(sizes, spare=1)
    probe = parts.runner(pools)
    plans = list(warmup.all_kinds(sizes))

    def compiling(done: int, total: int) -> None:
        stages("compile", done, total)

    levels.build_ahead(parts.bindings, partial(run_all, probe, plans, lambda done, total: None), compiling)
    run_all(probe, [*plans, *warmup.reporting(sizes)], compiling)
    stages("memory")
    meter.restart()
    run_all(probe, warmup.largest_steps(sizes), lambda done, total: stages("memory", done, total))
    peak = meter.peak()
    captured = 0
    if keys:
        # graphs share the tensors of the largest one
        held = meter.restart()
        run_all(probe, warmup.captured_steps(sizes, keys), lambda done, total: stages("memory"))
        captured = meter.peak() - held + len(keys) * (1 + (parts.drafting is not None)) * memory.GRAPH_BYTES
    total, others = meter.total_and_others()
    activations = peak - weights - parts.cache_bytes(pools)
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


def start(parts: Parts, config: Config, level: int, stages: Stages) -> tuple[Runner, tuple[int, ...]]:
    """The runner, warm, with as many KV blocks as fit, and how many of each pool the scheduler may use.

    Raises ConfigError.
    """
    level = level if parts.model.compiles else levels.EAGER
    if levels.is_worth_compiling(level, parts.bindings):
        stages("compile")
        parts.model.pieces = levels.compile_pieces(level, parts.model)
    drafts = parts.drafting.tokens if parts.drafting is not None else 0
    sizes = warmup.Sizes(
        parts.shape,
        config.scheduler.step_tokens,
        config.scheduler.chunk_tokens,
        parts.groups,
        drafts,
        config.speculative.max_rows if drafts else 0,
        vectors=parts.model.gives_hidden,
    )
    wanted = config.kv.blocks, config.kv.memory_gib
    if parts.device.type == "cpu":
        stages("memory")
        free_bytes = memory.cpu_free_bytes() // (config.services.worker.replicas * config.worker.tensor_parallel)
        spare = parts.drafting.spare if parts.drafting is not None else 0
        limits = memory.Limits(*wanted, free_bytes)
        budget = memory.choose_pools(parts.layout, parts.pool_bytes, parts.shape, limits, spare)
        log.info("%s", budget.text)
        pools = parts.agreed(budget.pools)
        runner = parts.runner([blocks + spare for blocks in pools])
        run_all(
            runner,
            warmup.first_steps(sizes._replace(fewest=parts.fewest_pages(pools))),
            lambda done, total: stages("compile", done, total),
        )
        return runner, pools
    limit = config.worker.max_graph_rows if level == levels.CAPTURED else 0
    wanted_graphs = graphs.layouts(sizes.most_entries, limit, sizes.step_tokens, parts.shape.max_len)
    wanted_graphs = tuple(key for key in wanted_graphs if key.chunk <= most_captured(parts.model.spec.latent))
    with explained("the largest step", "lower scheduler.step_tokens or scheduler.max_rows"):
        readings = measure(parts, sizes, wanted_graphs, stages)
    limits = memory.Limits(*wanted, memory.for_cache(readings, config.kv.gpu_memory_utilization), readings.left)
    # one block more than the scheduler knows: what pads a captured batch is written there
    budget = memory.choose_pools(parts.layout, parts.pool_bytes, parts.shape, limits, spare=1)
    log.info("%s", budget.text)
    pools = parts.agreed(budget.pools)
    with_spare = [blocks + 1 for blocks in pools]
    log.info("%s", memory.table(readings, parts.cache_bytes(with_spare)))
    runner = parts.runner(with_spare)
    run_all(
        runner,
        warmup.first_steps(sizes._replace(fewest=parts.fewest_pages(pools))),
        lambda done, total: stages("memory", done, total),
    )
    if wanted_graphs:
        with explained("the captured graphs", "lower kv.gpu_memory_utilization or worker.max_graph_rows"):
            runner.capture(wanted_graphs, lambda done, total: stages("capture", done, total))
    return runner, pools


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
        self._built = self._told = built = levels.builds()
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
        built = levels.builds()
        if (late := sum(built) - sum(self._told)) > 0:
            # steps have waited for them: the warm-up lacks a kind of step
            log.warning("%d kernels built while serving: %s", late, ", ".join(levels.newest_builds(late)))
            self._told = built
        return self._fixed | {"kernels_late": float(built.compiled - self._built.compiled)}
