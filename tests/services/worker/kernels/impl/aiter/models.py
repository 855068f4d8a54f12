"""Whole models of random weights on given bindings, and a scheduler of a few lines, for tests without a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.columns import pack_i32
from common.protocol import RowStart, Sampling
from services.worker.kernels.registry import Bindings
from services.worker.layers.decoder import Decoder, build_decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.rope import RopeTable
from services.worker.loader import expected_shapes
from services.worker.memory import Shape
from services.worker.models.registry import find_model
from services.worker.models.spec import Config
from services.worker.quant.contract import ExpertBiases
from services.worker.quant.experts import DenseExperts
from services.worker.quant.none import DenseProducts, DenseWeight
from services.worker.runner import Runner
from services.worker.state import Rows
from tests.services.worker.tiny import Driver

COMMON = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
MOE = {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"head_dim": 128, "num_attention_heads": 8},
    "Qwen2ForCausalLM": {"hidden_size": 128, "head_dim": 32},
    "Qwen3ForCausalLM": {"head_dim": 128},
    "Qwen3MoeForCausalLM": MOE,
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 256},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}
GREEDY = Sampling(max_tokens=64, temperature=0.0)
MAX_LEN, BLOCK_TOKENS = 192, 16


class Drawn:
    """Parameters of random numbers with the products of the bound ops. The same for any bindings."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], bindings: Bindings, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(5)
        self._tensors = {name: self._draw(name, shape, generator).to(dtype) for name, shape in shapes.items()}
        self._bindings = bindings

    def _draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        drawn = torch.randn(shape, generator=generator)
        return drawn * 0.2 if len(shape) > 1 else drawn.abs() + 0.5 if "norm" in name else drawn

    def weight(self, *names: str) -> DenseWeight:
        values = self.tensor(*names)
        return DenseWeight(values, None, DenseProducts(values, self._bindings))

    def tensor(self, *names: str, wide: bool = False) -> Tensor:
        values = torch.cat([self._tensors[name] for name in names])
        return values.float() if wide else values

    def experts(
        self, gate_up: Sequence[tuple[str, str]], down: Sequence[str], biases: ExpertBiases | None = None
    ) -> DenseExperts:
        stacked = torch.stack([self.tensor(*pair) for pair in gate_up])
        return DenseExperts(stacked, torch.stack([self.tensor(name) for name in down]), self._bindings, biases)

    def has(self, name: str) -> bool:
        return name in self._tensors


def make_model(architecture: str, bindings: Bindings, dtype: torch.dtype = torch.float32) -> Decoder:
    _, model = find_model([architecture])
    spec = model.read(Config({**COMMON, **CONFIGS[architecture], "architectures": [architecture]}))
    return build_decoder(spec, model, Drawn(expected_shapes(spec, model.names), bindings, dtype), bindings)


def serve(model: Decoder, bindings: Bindings, kv_dtype: torch.dtype = torch.float32, num_blocks: int = 40) -> Driver:
    spec = model.spec
    like = model.final_norm.weight
    rows = Rows(Shape(8, MAX_LEN, BLOCK_TOKENS), spec.vocab_size, (2,), torch.device("cpu"))
    storage = torch.zeros(KvCache.shape(spec, num_blocks, BLOCK_TOKENS), dtype=kv_dtype)
    cache = KvCache(storage, layout=bindings.layout)
    return Driver(Runner(model, rows, cache, RopeTable(spec.ropes, MAX_LEN, like), bindings))


def start(slot: int, tokens: Sequence[int], blocks: Sequence[int], computed: int = 0) -> RowStart:
    return RowStart(slot, slot, pack_i32(tokens), len(tokens), computed, pack_i32(blocks), GREEDY)


def generate(served: Driver, prompts: Sequence[Sequence[int]], num_tokens: int, chunk: int) -> list[list[int]]:
    """All prompts at once, in chunks, rows decoding while others are still read. Blocks are scattered."""
    pool = torch.randperm(served.runner.cache.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    added = []
    for slot, prompt in enumerate(prompts):
        needed = -(-(len(prompt) + num_tokens) // BLOCK_TOKENS)
        added.append(start(slot, prompt, [pool.pop() for _ in range(needed)]))
    known, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    while any(len(tokens) < len(prompt) + num_tokens for tokens, prompt in zip(known, prompts, strict=True)):
        work = []
        for slot, tokens in enumerate(known):
            if len(tokens) < len(prompts[slot]) + num_tokens:
                length = min(chunk, len(tokens) - done[slot])
                work.append((slot, done[slot], length, done[slot] + length == len(tokens)))
        # as the scheduler has it: rows with one token first
        work.sort(key=lambda row: row[2] > 1)
        sampled = iter(served.step(work, added=added))
        added = []
        for slot, position, length, samples in work:
            done[slot] = position + length
            if samples:
                known[slot].append(next(sampled))
    served.step([], removed=pack_i32(range(len(prompts))))
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]
