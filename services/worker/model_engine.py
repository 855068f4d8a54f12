"""The model engine: loads a model, measures memory, runs plans. Made once by the worker process from its parts.

Start-up order: checkpoint and configuration, op bindings, weights, then what startup.py does. A step that does not fit
the device's memory runs in pieces (shortage.py); every other device error ends the process.
"""

import gc
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from common.config import Config, Speculative
from common.errors import ConfigError
from common.pooling import Embedding
from common.protocol import ModelFacts, Progress, StepPlan
from services.worker import compile as levels
from services.worker import fallback, memory
from services.worker.binding import Bench, bind_tested, with_right_sums
from services.worker.builders import cache_root, open_builders
from services.worker.division import Division
from services.worker.drafting import Smaller, choose_drafting, with_drafts
from services.worker.embedding import embedding_of
from services.worker.file_reader import FileReader
from services.worker.grammars import Grammars, open_words
from services.worker.group import Group, Place
from services.worker.held import HeldTokens
from services.worker.kernels.gpu_arch import arch_of
from services.worker.kernels.registry import BindError, Bindings, Facts
from services.worker.layers.decoder import Decoder, build_decoder
from services.worker.layers.kv_cache import storage_dtype
from services.worker.layers.kv_scales import KvScales
from services.worker.layers.rope import RopeTable
from services.worker.loader import expected_shapes, load_parameters
from services.worker.models import spec as models
from services.worker.profile import Profile
from services.worker.quant.coding import Coding, read_coding
from services.worker.quant.registry import activation_dtype, choose_policy
from services.worker.random_weights import draw_all
from services.worker.results import StepTokens
from services.worker.runner import copies_of
from services.worker.shares import local_spec
from services.worker.shortage import Outcome, Retry, attempt, is_out_of_memory
from services.worker.source import ModelSource, open_model
from services.worker.staging import RING
from services.worker.startup import Figures, Parts, Stages, explained, open_cache, start
from services.worker.state import Step

log = logging.getLogger("worker")


def facts_of(
    device: torch.device,
    dtype: torch.dtype,
    spec: models.DecoderSpec,
    block_tokens: int,
    kv_dtype: torch.dtype,
    kv_scales_each: bool = False,
) -> Facts:
    """What kernels may be chosen by."""
    shapes = {
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_size": spec.hidden_size,
        "block_tokens": block_tokens,
        "kv_fp8": int(kv_dtype.itemsize == 1) * (2 if kv_scales_each else 1),
        "window": max(spec.windows, default=0),
        "sinks": int(spec.sinks),
        "own_values": int(spec.has_own_values),
    }
    if (latent := spec.latent) is not None:
        shapes |= {"kv_lora_rank": latent.latent, "q_lora_rank": latent.query_rank, "latent_row": latent.row}
        shapes |= {"qk_nope_head_dim": latent.nope_dim, "qk_rope_head_dim": latent.rope_dim}
        shapes |= {"v_head_dim": latent.value_dim}
        if (indexer := latent.indexer) is not None:
            shapes |= {"index_heads": indexer.num_heads, "index_head_dim": indexer.head_dim}
            shapes["index_top_k"] = indexer.top_k
    if spec.moe is not None:
        shapes |= {"num_experts": spec.moe.num_experts, "expert_size": spec.moe.inner}
        if (grouped := spec.moe.grouped) is not None:
            shapes["num_expert_groups"] = grouped.num_groups
    return Facts(device.type, arch_of(device), dtype, shapes)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choose_device(name: str, instance: int = 0) -> torch.device:
    """`name`: auto, cpu, cuda (ROCm's devices too) or cuda:0. Worker number `instance` has the GPU of that number.

    Raises ConfigError if it is not there. The chosen GPU becomes the process's current one, where kernels are launched.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f'worker.device is "{name}", but torch {torch.__version__} sees no GPU')
    number = 0 if name == "cuda:0" else instance
    count = torch.cuda.device_count()
    if number >= count:
        raise ConfigError(
            f"worker-{instance} has no GPU: {count} can be seen, and each worker needs one of its own, or as many as "
            f"worker.tensor_parallel says; lower services.worker.replicas, or set worker.device to "
            f'"cuda:0" where each worker sees only its own'
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def cpu_threads(configured: int, replicas: int, cores: int) -> int:
    """Threads of the kernels of one of `replicas` processes: as configured, or its share of the cores."""
    return configured or max(cores // replicas, 1)


def mask_threads() -> int:
    """For the masks of rows under a grammar; they run beside the device's work, not beside other work of the host."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


class Loaded(NamedTuple):
    """A model on its device, and what was decided for it."""

    architecture: str  # as the checkpoint names it
    model: Decoder
    bindings: Bindings
    kv_dtype: torch.dtype
    attention_parity: int  # of the whole model
    kv_scales: KvScales


def load_model(
    source: ModelSource,
    config: Config,
    device: torch.device,
    stages: Stages,
    level: int,
    watched: Path | None = None,
    group: Group | None = None,
) -> Loaded:
    """`watched`: where kernels are built. With a `group` this rank's share of the model. Raises ConfigError."""
    stages("kernels")
    is_random = config.model.weights == "random"
    try:
        activation = activation_dtype(config.model.dtype, device)
        architectures = models.Config(source.config).get(list, "architectures")
        architecture, model = fallback.find(architectures, config)
        whole = model.read(models.Config(source.config))
        whole = with_drafts(whole, config.speculative, model.names.mtp, source.tensors)
        coding = read_coding(source.config, str(source.files.path), config.worker.quantize, not is_random)
        if model is fallback.MODEL and coding != Coding():
            raise ConfigError(f"{source.files.path}: {architecture} has no model file, which coded weights need")
        rank = group.rank._replace(unit=coding.unit) if group is not None else None
        spec = whole if rank is None else local_spec(whole, rank)
        if spec.rope.rotary_dim % 2:
            raise ValueError(f"config: rope turns pairs, and heads have {spec.rope.rotary_dim} numbers to turn")
        kv_dtype = storage_dtype(config.kv.dtype, activation, arch_of(device))
        kv_each = config.kv.dtype == "fp8_per_token_head"
        if spec.latent is not None and kv_dtype != activation and (spec.latent.gate or kv_each):
            why = "a gate's numbers need 16 bits" if spec.latent.gate else "latents have one scale for all heads"
            raise ConfigError(f'kv.dtype is "{config.kv.dtype}": {why}; set "auto"')
        facts = facts_of(device, activation, spec, config.kv.block_tokens, kv_dtype, kv_each)
        facts = replace(facts, shapes={**facts.shapes, **coding.ops})
        bench = Bench(device, cache_root(config), watched)
        with group.first_alone() if group is not None else nullcontext():
            bindings, verdicts = bind_tested(
                config, facts, spec, level, bench, lambda what, done: stages("self-test", done)
            )
        if group is not None:
            group.must_equal("kernels", bindings.digest)
            bindings = with_right_sums(config, facts, level, bindings, verdicts, group)
        policy = choose_policy(config.model.dtype, device, bindings, coding.quantize)
    except (ValueError, BindError) as error:
        own = "; the code that it brings (auto_map) is never run for weights" if "auto_map" in source.config else ""
        raise ConfigError(f"{source.files.path}: {error}{own}") from error
    for provider in dict.fromkeys(row.provider for row in bindings.table):
        ops = ", ".join(row.op for row in bindings.table if row.provider == provider)
        log.info("ops by %s: %s (`valence ops` says why)", provider, ops)
    log.info("activations in %s, KV cache in %s", name_of(activation), name_of(kv_dtype))
    division = Division(whole, model.names, rank, bindings) if rank is not None else None
    if model is fallback.MODEL:
        stages("weights")
        decoder = fallback.load(architecture, source.files.path, spec, activation, device, bindings)
        return Loaded(architecture, decoder, bindings, kv_dtype, whole.attention_parity, KvScales(kv_each))
    tensors = draw_all(expected_shapes(whole, model.names), device) if is_random else source.tensors
    report, begun_s = partial(stages, "weights"), time.perf_counter()
    parameters = load_parameters(tensors, model, whole, policy, report, division, coding.rules)
    decoder = build_decoder(spec, model, parameters, bindings)
    made = ", ".join(f"{name} {size / memory.GIB:.2f} GiB" for name, size in policy.made.items())
    took_s = time.perf_counter() - begun_s
    log.info("weights: %s, in %.1f s (%.1f GB/s)", made, took_s, sum(policy.made.values()) / took_s / 1e9)
    kv_scales = KvScales(kv_each, parameters.kv_scales)
    return Loaded(architecture, decoder, bindings, kv_dtype, whole.attention_parity, kv_scales)


def load_smaller(config: Config, device: torch.device, stages: Stages, level: int, name: str) -> Smaller:
    """A draft model, whole on every rank, in eager pieces. Raises ConfigError."""
    alone = msgspec.structs.replace(config, speculative=Speculative())
    with explained("the draft model's weights", "choose a smaller speculative.model"):
        loaded = load_model(open_model(name, reader=FileReader(device)), alone, device, stages, level)
    return Smaller(loaded.model, loaded.bindings, loaded.kv_dtype)


class ModelEngine:
    """With a `place` one rank of a group, whose ranks run the same plans at the same time."""

    _profile = Profile(None)  # none yet

    def __init__(
        self, config: Config, report: Callable[[Progress], None], instance: int = 0, place: Place | None = None
    ) -> None:
        started_s = time.perf_counter()
        stages = Stages(report)
        stages("model")
        name = config.worker.device
        device = choose_device("cuda" if place is not None and name == "cuda:0" else name, instance)
        level = levels.choose_level(config.worker.compile_level, device)
        if device.type == "cpu":
            cores = len(os.sched_getaffinity(0))
            processes = config.services.worker.replicas * config.worker.tensor_parallel
            torch.set_num_threads(cpu_threads(config.worker.threads, processes, cores))
        group = Group(place, device) if place is not None else None
        compiles = device.type != "cpu" or level >= levels.INDUCTOR
        if compiles:
            levels.count_builds()
        reader = FileReader(device)
        source = open_model(config.model.source, config.model.weights == "checkpoint", reader)
        kept = open_cache(config, source.config, device) if compiles else None
        self._builders = open_builders(config, kept, arch_of(device)) if kept is not None else None
        waits = self._builders is not None and (group is None or group.leads)  # a group has one turn for all its ranks
        with self._builders.turn(stages) if self._builders is not None and waits else nullcontext():
            if group is not None:
                group.meet()
            watched = self._builders.watched if self._builders is not None else None
            with explained("the model's weights", "choose a smaller model.dtype or another device"):
                loaded = load_model(source, config, device, stages, level, watched, group)
            model = loaded.model
            shape = _shape(config, model.spec)
            with explained("the table of positions", "lower model.max_len"):
                rope = RopeTable(model.spec.ropes, shape.max_len, model.final_norm.weight)
            drafting = choose_drafting(
                config.speculative, model, shape, partial(load_smaller, config, device, stages, level)
            )
            ends, vocab_size = source.eos_token_ids, model.spec.vocab_size
            words = partial(open_words, config.model, vocab_size, ends)
            grammars = Grammars(vocab_size, ends, words, mask_threads(), leads=group is None or group.leads)
            given = rope, shape, ends, device, loaded.kv_dtype, group
            more = config.kv.checkpoint_tokens, loaded.kv_scales, drafting, grammars
            parts = Parts(model, loaded.bindings, *given, *more)
            self._runner, pools = start(parts, config, level, stages)
            stages("vocabulary")
            grammars.ready()
        stages.end()
        self.max_rows = shape.max_rows
        self.facts = ModelFacts(
            name=config.model.name or source.name,
            architecture=loaded.architecture,
            vocab_size=model.spec.vocab_size,
            max_model_len=shape.max_len,
            eos_token_ids=source.eos_token_ids,
            block_tokens=shape.block_tokens,
            num_blocks=pools[0],
            dtype=name_of(model.final_norm.weight.dtype),
            ops_hash=loaded.bindings.digest,
            kv_dtype=name_of(loaded.kv_dtype),
            attention_parity=loaded.attention_parity,
            groups=parts.groups,
            pools=pools[1:],
            drafts=drafting.tokens if drafting is not None else 0,
            draft_rows=config.speculative.max_rows,
            embedding=_embedding(config, source, loaded),
        )
        self._group = group
        self._recent: deque[Outcome] = deque(maxlen=RING)
        self._figures = Figures(stages.seconds, time.perf_counter() - started_s)

    def execute(self, plan: StepPlan) -> Outcome:
        """Starts the plan's step, in pieces if the device has too little memory for the whole."""
        self._profile.step()
        step = self._runner.apply(plan)
        for pool, source, target in copies_of(plan):
            self._copy(pool, source, target)
        # Ranks cannot run other pieces than each other: where one lacks memory, the group ends and starts afresh.
        tokens = attempt(step, self._run) if self._group is None else self._run(step)
        if tokens is not None:
            outcome = Outcome(tokens)
        else:
            for earlier in self._recent:
                earlier.tokens()  # many pieces would come round to the place where these lie
            retry = Retry(self._run, self._free, self._runner.rows.give_up)
            # a step that stopped halfway has brought some layers' states forward
            stateful = any(more.is_state for more in self._runner.rows.beside)
            outcome = retry.give_up(step) if stateful else retry(step)
        self._recent.append(outcome)
        return outcome

    def _run(self, step: Step) -> StepTokens | HeldTokens:
        try:
            return self._runner.run(step)
        except RuntimeError as error:
            if (self._runner.rows.computed[step.slots] != step.positions).any():
                raise AssertionError("too late to run this step again") from error
            raise

    def figures(self) -> dict[str, float]:
        return self._figures()

    def profile(self, folder: Path | None) -> None:
        if folder != self._profile.folder:
            self._profile.end()
            self._profile = Profile(folder)

    def reset(self) -> None:
        self._runner.reset()

    def close(self) -> None:
        """A group's ranks do so at the same time. NCCL waits for the end of the graphs that hold its calls."""
        if self._group is not None:
            del self._runner
            gc.collect()
            self._group.leave()

    def _copy(self, pool: int, source: list[int], target: list[int]) -> None:
        """No block is both, so they may be copied singly where there is no memory for all at once."""
        try:
            self._runner.copy_blocks(source, target, pool)
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        self._free()
        for read, written in zip(source, target, strict=True):
            self._runner.copy_blocks([read], [written], pool)

    def _free(self) -> None:
        device = self._runner.rows.tokens.device
        if device.type != "cpu":
            torch.cuda.synchronize(device)  # what failed halfway still reads its inputs
            torch.cuda.empty_cache()


def _embedding(config: Config, source: ModelSource, loaded: Loaded) -> Embedding:
    """What vectors the model gives."""
    if not loaded.model.gives_hidden:
        return Embedding(lacks=f"{loaded.architecture} runs by transformers' code, which keeps its hidden states")
    return embedding_of(config.model, source.files, source.config, loaded.model.spec.hidden_size)


def _shape(config: Config, spec: models.DecoderSpec) -> memory.Shape:
    """Raises ConfigError for a limit that the model does not have."""
    wanted = config.model.max_len
    if wanted > spec.max_position:
        raise ConfigError(f"model.max_len is {wanted}, the model was made for at most {spec.max_position} tokens")
    return memory.Shape(config.scheduler.max_rows, wanted or spec.max_position, config.kv.block_tokens)
