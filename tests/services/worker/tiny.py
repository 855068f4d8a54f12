"""Tiny random checkpoints, saved by transformers and read by us: one of every architecture, and variants by name.

An architecture's own is derived from its transformers configuration, so that a new model file has one by being there.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from common.columns import pack_i32, unpack_i32
from common.config import Speculative
from common.protocol import Copies, RowStart, RowTable, Sampling, StepPlan
from services.worker.draft_state import DraftState
from services.worker.drafting import Drafting, Site, with_drafts
from services.worker.groups import Layout, Storage, plain
from services.worker.kernels.registry import Bindings, Facts, bind
from services.worker.layers.decoder import Decoder, build_decoder
from services.worker.layers.kv_cache import GroupedCache
from services.worker.layers.rope import RopeTable
from services.worker.loader import load_parameters
from services.worker.memory import Shape
from services.worker.models.caches import RecurrentState
from services.worker.models.registry import all_models, find_model
from services.worker.models.spec import Config
from services.worker.quant.registry import choose_policy
from services.worker.runner import Runner
from services.worker.source import open_model
from services.worker.state import Rows

VOCABULARY = 131
GREEDY = Sampling(max_tokens=64, temperature=0.0)
FLOAT = Storage(torch.float32, torch.float32)
NO_DRAFTS = Speculative()
MTP = Speculative(method="mtp", tokens=3)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
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
# What some configurations have besides; a window that a prompt of 150 tokens leaves, in some of three layers.
SMALL = {
    "head_dim": 16,
    "sliding_window": 24,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "query_pre_attn_scalar": 24,
    "image_token_id": VOCABULARY - 1,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "index_topk": 20,
    "index_n_heads": 16,  # so many that no score is 0, which would be a tie
    "index_head_dim": 16,
}
# By model_type.
OWN: dict[str, dict[str, Any]] = {
    # a norm behind a state makes noise of what is small there
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "initializer_range": 0.15,
    },
    "mimo_v2_flash": {"num_attention_heads": 8, "head_dim": 24, "v_head_dim": 16},
}
LATENT = {
    "num_key_value_heads": 6,
    **{key: SMALL[key] for key in SMALL if "lora" in key or key.startswith(("qk_", "v_"))},
}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MOE = {"moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 3}
# name: (architecture, changes of its configuration's defaults)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama_tied_biased": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama_llama3_rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama_linear_rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama_yarn_rope": ("LlamaForCausalLM", {"rope_parameters": YARN}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3_tied": ("Qwen3ForCausalLM", {"head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"head_dim": 16, **MOE, "norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "Qwen3MoeForCausalLM",
        {"head_dim": 8, **MOE, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "glm4_moe_biased": (
        "Glm4MoeForCausalLM",
        {"head_dim": 16, "attention_bias": True, "n_routed_experts": 8, "moe_intermediate_size": 40, "n_group": 4}
        | {"topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2, "norm_topk_prob": False},
    ),
    "gpt_oss_64": ("GptOssForCausalLM", {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4}),
    "deepseek_v2_lite": (  # no latent of the query, all experts in one group
        "DeepseekV2ForCausalLM",
        LATENT
        | {"q_lora_rank": None, "n_routed_experts": 8, "moe_intermediate_size": 40, "num_experts_per_tok": 3}
        | {"first_k_dense_replace": 1, "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v2_groups": (
        "DeepseekV2ForCausalLM",
        LATENT
        | {"n_routed_experts": 8, "moe_intermediate_size": 40, "num_experts_per_tok": 3, "n_group": 4}
        | {"topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0},
    ),
    "deepseek_v3_yarn": (
        "DeepseekV3ForCausalLM",
        LATENT
        | {"n_routed_experts": 8, "moe_intermediate_size": 40, "num_experts_per_tok": 3, "n_group": 4}
        | {"topk_group": 2, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}, "attention_bias": True}
        | {"first_k_dense_replace": 1, "rope_interleave": False},
    ),
    "glm_moe_dsa_shared": (  # the second layer attends to what the first one chose
        "GlmMoeDsaForCausalLM",
        LATENT
        | {"n_routed_experts": 8, "moe_intermediate_size": 40, "num_experts_per_tok": 3, "index_topk": 30}
        | {"index_n_heads": 16, "index_head_dim": 12, "mlp_layer_types": ["sparse", "dense", "sparse"]}
        | {"indexer_types": ["full", "shared", "full"], "head_dim": 8},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {"sliding_window": None, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
}


def every() -> list[str]:
    """Architectures that can be served, and variants."""
    return [*all_models(), *VARIANTS]


def small_config(kind: type) -> Any:
    """Of a configuration class of transformers, its text part where it has more."""
    default = kind()
    text = getattr(default, "text_config", None)
    if text is not None:
        part = small_config(type(text))
        tied = part.tie_word_embeddings
        return kind(text_config=part.to_dict(), vision_config=VISION, tie_word_embeddings=tied)
    known = {key: value for key, value in SMALL.items() if hasattr(default, key)}
    if "kv_lora_rank" in known:
        known.pop("layer_types", None)
        known |= {"num_key_value_heads": COMMON["num_attention_heads"], "head_dim": SMALL["qk_rope_head_dim"]}
    return kind(**COMMON | known | OWN.get(default.model_type, {}))


def reference_class(architecture: str) -> Any:
    """transformers' class, or a test's own where there is none."""
    import transformers

    from tests.services.worker import eg_mla

    return getattr(eg_mla, architecture, None) or getattr(transformers, architecture)


def config_values(architecture: str) -> dict[str, Any]:
    """The derived configuration, as config.json has it."""
    values: dict[str, Any] = small_config(reference_class(architecture).config_class).to_dict()
    return values


def make_reference(name: str, config: Any = None) -> Any:
    """transformers' model, in float32, weights such that nothing it does is without effect. `config`: else its own."""
    architecture, changes = VARIANTS.get(name, (name, None))
    kind = reference_class(architecture)
    torch.manual_seed(sum(map(ord, name)))
    if config is None:
        config = small_config(kind.config_class) if changes is None else kind.config_class(**COMMON | changes)
    reference = kind._from_config(config, attn_implementation="eager").eval()
    for key, values in (*reference.named_parameters(), *reference.named_buffers()):
        if re.search(r"bias$|norm.*weight$", key):
            torch.nn.init.uniform_(values, 0.5, 1.5)
        if key.endswith("sinks"):
            torch.nn.init.uniform_(values, -1.0, 3.0)
        if key.endswith("A_log"):  # what a state forgets in a step: with transformers' own nothing lasts for two
            torch.nn.init.uniform_(values, -5.0, -1.0)
    return reference


@dataclass
class Tiny:
    """A checkpoint in two implementations: `reference` is transformers', `decoder` ours from the files in `folder`."""

    reference: Any
    folder: Path
    decoder: Decoder

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """As the file has them."""
        return load_file(self.folder / "model.safetensors")

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """The reference's logits of every position, float32 [len(tokens), V]."""
        with torch.inference_mode():
            return torch.as_tensor(self.reference(torch.tensor([list(tokens)])).logits[0])

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def driver(
        self, num_blocks: int = 64, max_rows: int = 40, block_tokens: int = 8, drafts: Drafting | None = None
    ) -> "Driver":
        spec, bindings = self.decoder.spec, bind(("torch",), Facts("cpu"))
        layout, cpu = layout_of(self.decoder, block_tokens), torch.device("cpu")
        state = DraftState(max_rows, drafts.tokens, cpu) if drafts is not None else None
        rows = Rows(Shape(max_rows, 200, block_tokens), spec.vocab_size, (2,), cpu, layout.groups, state)
        cache = GroupedCache(layout, [num_blocks] * len(layout.pools), block_tokens, FLOAT, cpu)
        rope = RopeTable(spec.ropes, 200, self.decoder.final_norm.weight)
        proposing = drafts.make(Site(self.decoder, cache, rope, bindings)) if drafts is not None else None
        return Driver(Runner(self.decoder, rows, cache, rope, bindings, proposing))


def layout_of(decoder: Decoder, block_tokens: int = 8) -> Layout:
    """All pages in one group, so that a row has one table; states in another."""
    kept = [decoder.spec.cache_of(layer) for layer in range(decoder.spec.num_layers)]
    return (
        decoder.layout(block_tokens, FLOAT) if any(isinstance(each, RecurrentState) for each in kept) else plain(kept)
    )


@dataclass
class Driver:
    """A scheduler of a few lines: makes plans for given rows and keeps the books that the protocol asks for."""

    runner: Runner
    steps: Any = field(default_factory=count)

    def start(
        self, slot: int, tokens: Sequence[int], blocks: Sequence[int], sampling: Sampling = GREEDY, **changes: int
    ) -> RowStart:
        known = {"num_prompt": len(tokens), "computed": 0} | changes
        ids, places = pack_i32(tokens), pack_i32(blocks)
        # a row's state is in the block that has the row's number
        tables = tuple(RowTable(0, pack_i32([slot])) for _ in self.runner.rows.beside)
        return RowStart(slot, slot, ids, known["num_prompt"], known["computed"], places, sampling, tables=tables)

    def copied(self, source: int, target: int) -> tuple[Copies, ...]:
        """A plan's copies, so that row `target` begins with the state of row `source`."""
        blocks = pack_i32([source]), pack_i32([target])
        return tuple(Copies(more.group.pool, *blocks) for more in self.runner.rows.beside)

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


def load_decoder(
    folder: Path, opaque: bool = False, bindings: Bindings | None = None, speculative: Speculative = NO_DRAFTS
) -> Decoder:
    """As the worker does in its exact mode; every tensor must have been asked for. `opaque`: to be compiled."""
    source, bindings = open_model(str(folder)), bindings or bind(("torch",), Facts("cpu"), opaque=opaque)
    architectures = source.config["architectures"]
    assert isinstance(architectures, list)
    _, model = find_model(architectures)
    spec = model.read(Config(source.config))
    spec = with_drafts(spec, speculative, model.names.mtp, source.tensors)
    parameters = load_parameters(source.tensors, model, spec, choose_policy("float32", bindings=bindings))
    decoder = build_decoder(spec, model, parameters, bindings)
    assert parameters.unread() == []
    return decoder


def make_tiny(name: str, folder: Path) -> Tiny:
    reference = make_reference(name)
    reference.save_pretrained(folder)
    return Tiny(reference, folder, load_decoder(folder))
