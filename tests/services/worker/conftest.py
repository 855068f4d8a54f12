"""Tiny random checkpoints, made by transformers from a config only, and a runner on each; plans made by hand."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.columns import pack_i32, unpack_i32
from common.protocol import RowStart, Sampling, StepPlan
from services.worker.kernels.registry import Facts, bind
from services.worker.layers.decoder import Decoder, build_decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.rope import RopeTable
from services.worker.memory import Shape
from services.worker.models.registry import find_model
from services.worker.models.spec import Config
from services.worker.runner import Runner
from services.worker.state import Rows

GREEDY = Sampling(max_tokens=64, temperature=0.0)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
COMMON = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
MOE = {"moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 3}
# name: (transformers config class, changes)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied_biased": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_llama3_rope": ("LlamaConfig", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama_linear_rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama_yarn_rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, **MOE, "norm_topk_prob": True}),
    "qwen3_moe_mixed": ("Qwen3MoeConfig", {"head_dim": 8, **MOE, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "mixtral": ("MixtralConfig", {"sliding_window": None, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_tied": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 6}),
}


class PlainWeight:
    """The least that a `Weight` can be, so that these tests do not depend on any format."""

    format_name = "plain"
    fused = None

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.out_features, self.in_features = values.shape
        self.num_bytes = values.numel() * values.element_size()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = x @ self.values.T
        return product if bias is None else product + bias

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.values[ids.long()]

    def dequantize(self) -> torch.Tensor:
        return self.values.float()


class PlainExperts:
    """The least that `ExpertWeights` can be: every token by itself."""

    format_name = "plain"

    def __init__(self, experts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        self.experts = experts
        self.num_experts = len(experts)
        self.num_bytes = sum(part.nbytes for expert in experts for part in expert)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> None:
        for t, chosen in enumerate(experts.tolist()):
            for weight, expert in zip(weights[t], chosen, strict=True):
                gate, up, down = self.experts[expert]
                residual[t] += weight * (down @ (torch.nn.functional.silu(gate @ x[t]) * (up @ x[t])))


class StateDict:
    """`Parameters` from a transformers state dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.asked: list[str] = []

    def experts(self, gate_up: Sequence[tuple[str, str]], down: Sequence[str]) -> PlainExperts:
        names = [(*pair, out) for pair, out in zip(gate_up, down, strict=True)]
        return PlainExperts([(self.tensor(gate), self.tensor(up), self.tensor(out)) for gate, up, out in names])

    def weight(self, *names: str) -> PlainWeight:
        return PlainWeight(self.tensor(*names))

    def tensor(self, *names: str) -> torch.Tensor:
        self.asked += names
        return torch.cat([self.tensors[name] for name in names])

    def has(self, name: str) -> bool:
        return name in self.tensors


def checkpoint_tensors(reference: Any) -> dict[str, torch.Tensor]:
    """By their names in files: in memory, transformers stacks experts and calls them otherwise."""
    state = {key: value.detach() for key, value in reference.state_dict().items()}
    if not any(".experts." in key for key in state):
        return state
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


@dataclass
class Tiny:
    """A checkpoint in two implementations: `reference` is transformers', `decoder` is ours."""

    reference: Any
    decoder: Decoder
    parameters: StateDict

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """The reference's logits of every position, float32 [len(tokens), V]."""
        with torch.inference_mode():
            return torch.as_tensor(self.reference(torch.tensor([list(tokens)])).logits[0])

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def driver(self, num_blocks: int = 64, max_rows: int = 40, block_tokens: int = 8) -> "Driver":
        spec = self.decoder.spec
        rows = Rows(Shape(max_rows, 200, block_tokens), spec.vocab_size, (2,), torch.device("cpu"))
        cache = KvCache(torch.zeros(KvCache.shape(spec, num_blocks, block_tokens)))
        rope = RopeTable(spec.rope, 200, self.decoder.final_norm.weight)
        return Driver(Runner(self.decoder, rows, cache, rope, bind(("torch",), Facts("cpu"))))


@dataclass
class Driver:
    """A scheduler of a few lines: makes plans for given rows and keeps the books that the protocol asks for."""

    runner: Runner
    steps: Any = field(default_factory=count)

    def start(
        self, slot: int, tokens: Sequence[int], blocks: Sequence[int], sampling: Sampling = GREEDY, **changes: int
    ) -> RowStart:
        known = {"num_prompt": len(tokens), "computed": 0} | changes
        return RowStart(
            slot, slot, pack_i32(tokens), known["num_prompt"], known["computed"], pack_i32(blocks), sampling
        )

    def step(self, work: Sequence[tuple[int, int, int, bool]], **changes: Any) -> list[int]:
        """work: (slot, position, count, samples) per row; returns the sampled tokens."""
        plan = StepPlan(
            next(self.steps),
            slots=pack_i32(row[0] for row in work),
            positions=pack_i32(row[1] for row in work),
            counts=pack_i32(row[2] for row in work),
            samples=bytes(row[3] for row in work),
            **changes,
        )
        return list(unpack_i32(self.runner.execute(plan).tokens()))

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, chunk: int = 200, sampling: Sequence[Sampling] = ()
    ) -> list[list[int]]:
        """All prompts at once, prefill in chunks, rows decoding while others prefill."""
        size = self.runner.rows.block_tokens
        added, first = [], 0
        for slot, prompt in enumerate(prompts):
            needed = -(-(len(prompt) + num_tokens) // size)
            blocks = range(first, first + needed)
            added.append(self.start(slot, prompt, blocks, sampling[slot] if sampling else GREEDY))
            first += needed
        known, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
        while any(len(tokens) < len(prompt) + num_tokens for tokens, prompt in zip(known, prompts, strict=True)):
            work = []
            for slot, tokens in enumerate(known):
                if len(tokens) < len(prompts[slot]) + num_tokens:
                    length = min(chunk, len(tokens) - done[slot])
                    work.append((slot, done[slot], length, done[slot] + length == len(tokens)))
            sampled = iter(self.step(work, added=added))
            added = []
            for slot, position, length, samples in work:
                done[slot] = position + length
                if samples:
                    known[slot].append(next(sampled))
        self.step([], removed=pack_i32(range(len(prompts))))
        return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]


@pytest.fixture(scope="session")
def make_tiny() -> Callable[[str], Tiny]:
    """By name of TINY; each is made once."""
    made: dict[str, Tiny] = {}

    def make(name: str) -> Tiny:
        if name not in made:
            import transformers

            kind, changes = TINY[name]
            torch.manual_seed(len(made) + 1)
            config = getattr(transformers, kind)(**COMMON | changes)
            reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            for parameter_name, parameter in reference.named_parameters():
                if parameter_name.endswith("bias") or "norm" in parameter_name:
                    torch.nn.init.uniform_(parameter, 0.5, 1.5)
            values = config.to_dict() | {"architectures": [type(reference).__name__]}
            _, model = find_model(values["architectures"])
            spec = model.read(Config(values))
            parameters = StateDict(checkpoint_tensors(reference))
            decoder = build_decoder(spec, model, parameters, bind(("torch",), Facts("cpu")))
            made[name] = Tiny(reference, decoder, parameters)
        return made[name]

    return make


@pytest.fixture
def tiny(make_tiny: Callable[[str], Tiny]) -> Tiny:
    return make_tiny("llama")


@pytest.fixture
def plain_weight() -> Callable[[torch.Tensor], PlainWeight]:
    return PlainWeight
