"""The model engine: loads a model, measures memory, runs plans. Made once by the worker process from its parts.

Start-up order: checkpoint and configuration, op bindings, weights, KV blocks, a warm-up through `execute`.
"""

import logging
import math
import os
from collections.abc import Callable

import torch

from common.columns import pack_i32
from common.config import Config
from common.errors import ConfigError
from common.protocol import ModelFacts, Progress, RowStart, Sampling, StepPlan
from services.worker import memory
from services.worker.kernels.registry import BindError, Bindings, Facts, bind
from services.worker.layers.decoder import Decoder, build_decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.rope import RopeTable
from services.worker.loader import expected_shapes, load_parameters
from services.worker.models import spec as models
from services.worker.models.registry import find_model
from services.worker.quant.registry import activation_dtype, choose_policy
from services.worker.random_weights import draw_all
from services.worker.runner import Runner, StepTokens
from services.worker.source import ModelSource, open_model
from services.worker.state import Rows

log = logging.getLogger("worker")


def facts_of(device: torch.device, dtype: torch.dtype, spec: models.DecoderSpec, block_tokens: int) -> Facts:
    """What kernels may be chosen by."""
    arch = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        arch = getattr(properties, "gcnArchName", "") or f"sm_{properties.major}{properties.minor}"
    shapes = {
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_size": spec.hidden_size,
        "block_tokens": block_tokens,
    }
    return Facts(device.type, arch.partition(":")[0], dtype, shapes)


def choose_device(name: str) -> torch.device:
    """`name`: auto, cpu or cuda (ROCm's devices too). Raises ConfigError if it is not there."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f'worker.device is "{name}", but torch {torch.__version__} sees no GPU')
    return torch.device("cuda", 0)


def load_model(
    source: ModelSource, config: Config, device: torch.device, report: Callable[[Progress], None]
) -> tuple[str, Decoder, Bindings]:
    """The architecture's name, the model on its device, and the ops it is bound to. Raises ConfigError."""
    report(Progress("kernels"))
    try:
        activation = activation_dtype(config.model.dtype, device)
        architectures = models.Config(source.config).get(list, "architectures")
        architecture, model = find_model(architectures)
        spec = model.read(models.Config(source.config))
        facts = facts_of(device, activation, spec, config.kv.block_tokens)
        bindings = bind(config.worker.kernels, facts)
        policy = choose_policy(config.model.dtype, device, bindings)
    except (ValueError, BindError) as error:
        raise ConfigError(f"{source.files.path}: {error}") from error
    for provider in dict.fromkeys(row.provider for row in bindings.table):
        ops = ", ".join(row.op for row in bindings.table if row.provider == provider)
        log.info("ops by %s: %s (`valence ops` says why)", provider, ops)
    is_random = config.model.weights == "random"
    tensors = draw_all(expected_shapes(spec, model.names), device) if is_random else source.tensors
    parameters = load_parameters(
        tensors, model, spec, policy, lambda done, total: report(Progress("weights", done, total))
    )
    return architecture, build_decoder(spec, model, parameters, bindings), bindings


class ModelEngine:
    def __init__(self, config: Config, report: Callable[[Progress], None]) -> None:
        report(Progress("model"))
        device = choose_device(config.worker.device)
        if device.type == "cpu":
            torch.set_num_threads(config.worker.threads or len(os.sched_getaffinity(0)))
        source = open_model(config.model.source, with_tensors=config.model.weights == "checkpoint")
        architecture, model, bindings = load_model(source, config, device, report)
        report(Progress("kv cache"))
        shape = _shape(config, model.spec)
        like = model.final_norm.weight
        block_bytes = math.prod(KvCache.shape(model.spec, 1, shape.block_tokens)) * like.itemsize
        limits = memory.Limits(config.kv.blocks, config.kv.memory_gib, memory.free_bytes(device))
        budget = memory.choose_blocks(block_bytes, shape, limits)
        log.info("%s", budget.text)
        rows = Rows(shape, model.spec.vocab_size, source.eos_token_ids, device)
        cache_shape = KvCache.shape(model.spec, budget.num_blocks, shape.block_tokens)
        cache = KvCache(memory.zeros(cache_shape, like.dtype, device))
        self._runner = Runner(model, rows, cache, RopeTable(model.spec.rope, shape.max_len, like), bindings)
        self.max_rows = shape.max_rows
        self.facts = ModelFacts(
            name=config.model.name or source.name,
            architecture=architecture,
            vocab_size=model.spec.vocab_size,
            max_model_len=shape.max_len,
            eos_token_ids=source.eos_token_ids,
            block_tokens=shape.block_tokens,
            num_blocks=budget.num_blocks,
            dtype=str(like.dtype).removeprefix("torch."),
            ops_hash=bindings.digest,
        )
        report(Progress("warm-up"))
        self._warm_up(min(config.scheduler.step_tokens, 256, shape.max_len - 1))

    def execute(self, plan: StepPlan) -> StepTokens:
        return self._runner.execute(plan)

    def reset(self) -> None:
        self._runner.rows.reset()

    def _warm_up(self, num_prompt: int) -> None:
        """A prompt and a decode step, so that the first request finds memory mapped and libraries initialized."""
        blocks = range(-(-(num_prompt + 1) // self.facts.block_tokens))
        row = RowStart(
            slot=0,
            seq_id=0,
            tokens=pack_i32([0] * num_prompt),
            num_prompt=num_prompt,
            computed=0,
            blocks=pack_i32(blocks),
            sampling=Sampling(max_tokens=2, temperature=0.0),
        )
        slot, sampled = pack_i32([0]), b"\x01"
        prompt = StepPlan(
            0, added=[row], slots=slot, positions=pack_i32([0]), counts=pack_i32([num_prompt]), samples=sampled
        )
        decode = StepPlan(1, slots=slot, positions=pack_i32([num_prompt]), counts=pack_i32([1]), samples=sampled)
        for plan in (prompt, decode):
            self.execute(plan).tokens()
        self.reset()


def _shape(config: Config, spec: models.DecoderSpec) -> memory.Shape:
    """Raises ConfigError for a limit that the model does not have."""
    wanted = config.model.max_len
    if wanted > spec.max_position:
        raise ConfigError(f"model.max_len is {wanted}, the model was made for at most {spec.max_position} tokens")
    return memory.Shape(config.scheduler.max_rows, wanted or spec.max_position, config.kv.block_tokens)
