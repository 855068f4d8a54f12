"""Model folders for speed: a real configuration and a made-up tokenizer of the full vocabulary, but no weights.

With `model.weights = "random"` the services run them like a downloaded model. Every token id has a text: bytes, then
pairs of letters, then four letters, so that any sampled token makes an event.

    python -m benchmarks.models 0.6b /tmp/models
"""

import argparse
import itertools
import json
import string
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.published import PUBLISHED
from benchmarks.shapes import (
    DEEPSEEK_V3_4,
    DEEPSEEK_V32_4,
    GLM_AIR_16,
    GPT_OSS_20B,
    INDEX_DIM,
    INDEX_HEADS,
    LATENT,
    LLAMA_8B,
    QWEN3_30B_A3B,
    QWEN3_600M,
    ROTATED,
    VALUE,
    ModelShape,
)

TINY = ModelShape("Tiny", 2, 64, 4, 2, 16, 128, 2048, qk_norm=True, tie=True)
TINY_MOE = ModelShape("Tiny-MoE", 2, 64, 4, 2, 16, 64, 2048, experts=8, top_k=2, qk_norm=True)
SHAPES = {
    "0.6b": QWEN3_600M,
    "8b": LLAMA_8B,
    "30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "glm-air-16": GLM_AIR_16,
    "deepseek-v3-cut": DEEPSEEK_V3_4,
    "deepseek-v32-cut": DEEPSEEK_V32_4,
    "tiny": TINY,
    "tiny-moe": TINY_MOE,
}
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
LONG = 131_072  # positions: room for a prompt of 100,000 tokens


def config_of(shape: ModelShape, max_position: int = 0) -> dict[str, Any]:
    """config.json as on the hub. `max_position`: positions beyond or below those of the original; 0: the original's."""
    config: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.tie,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab,
    }
    if shape.query_rank:
        keys = _deepseek_keys
    elif shape.window:
        keys = _gpt_oss_keys
    elif shape.shared:
        keys = _glm_keys
    else:
        keys = _qwen3_keys if shape.qk_norm else _llama_keys
    return config | keys(shape) | _positions(shape, max_position)


def _positions(shape: ModelShape, max_position: int) -> dict[str, Any]:
    return {"max_position_embeddings": max_position or (40_960 if shape.qk_norm else LONG)}


def _qwen3_keys(shape: ModelShape) -> dict[str, Any]:
    bos, eos = special_ids(shape)
    keys: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "bos_token_id": bos,
        "eos_token_id": eos,
        "max_window_layers": shape.layers,
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    if shape.experts:
        keys |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "intermediate_size": 8 * shape.inner,  # of dense layers, which these models do not have
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": shape.inner,
            "norm_topk_prob": True,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.top_k,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }
    return keys


def _llama_keys(shape: ModelShape) -> dict[str, Any]:
    bos, eos = special_ids(shape)
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": bos,
        "eos_token_id": [eos],
        "mlp_bias": False,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500_000.0,
    }


def _gpt_oss_keys(shape: ModelShape) -> dict[str, Any]:
    bos, eos = special_ids(shape)
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "model_type": "gpt_oss",
        "num_experts_per_tok": shape.top_k,
        "num_local_experts": shape.experts,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150_000,
        "sliding_window": shape.window,
        "swiglu_limit": 7.0,
    }


def _glm_keys(shape: ModelShape) -> dict[str, Any]:
    bos, eos = special_ids(shape)
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "first_k_dense_replace": 0,
        "intermediate_size": 8 * shape.inner,  # of dense layers, which are cut off
        "model_type": "glm4_moe",
        "moe_intermediate_size": shape.inner,
        "n_group": 1,
        "n_routed_experts": shape.experts,
        "n_shared_experts": shape.shared,
        "norm_topk_prob": True,
        "num_experts_per_tok": shape.top_k,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    }


def _deepseek_keys(shape: ModelShape) -> dict[str, Any]:
    bos, eos = special_ids(shape)
    chosen = (
        {"index_head_dim": INDEX_DIM, "index_n_heads": INDEX_HEADS, "index_topk": shape.chosen} if shape.chosen else {}
    )
    return {
        "architectures": ["DeepseekV32ForCausalLM" if shape.chosen else "DeepseekV3ForCausalLM"],
        "bos_token_id": bos,
        "eos_token_id": eos,
        "first_k_dense_replace": 0,
        "intermediate_size": 9 * shape.inner,  # of dense layers, which are cut off
        "kv_lora_rank": LATENT,
        "model_type": "deepseek_v32" if shape.chosen else "deepseek_v3",
        "moe_intermediate_size": shape.inner,
        "n_group": 8,
        "n_routed_experts": shape.experts,
        "n_shared_experts": shape.shared,
        "norm_topk_prob": True,
        "num_experts_per_tok": shape.top_k,
        "q_lora_rank": shape.query_rank,
        "qk_nope_head_dim": shape.head_dim - ROTATED,
        "qk_rope_head_dim": ROTATED,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10_000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": VALUE,
        **chosen,
    }


def special_ids(shape: ModelShape) -> tuple[int, int]:
    """Begin and end of text, where the originals have them."""
    return {151_936: (151_643, 151_645), 128_256: (128_000, 128_009)}.get(
        shape.vocab, (shape.vocab - 2, shape.vocab - 1)
    )


def _words() -> Iterator[tuple[str, tuple[str, str]]]:
    """Tokens beyond bytes with the merge that makes each."""
    pairs = ["".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2)]
    for pair in pairs:
        yield pair, (pair[0], pair[1])
    for first, second in itertools.product(pairs, repeat=2):
        yield first + second, (first, second)


def _byte_letters() -> list[str]:
    """The printable stand-in of each byte that byte-level tokenizers use."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]


def tokenizer_of(shape: ModelShape) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE whose ids 0 .. vocab - 1 all have a token."""
    bos, eos = special_ids(shape)
    names = {bos: "<|begin|>", eos: "<|end|>"}
    tokens, merges = _byte_letters(), []
    words = _words()
    while len(tokens) < shape.vocab:
        if name := names.get(len(tokens)):
            tokens.append(name)
        else:
            token, merge = next(words)
            tokens.append(token)
            merges.append(list(merge))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": place, "content": name, **flags} for place, name in sorted(names.items())],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def write_model(root: Path, shape: ModelShape, max_position: int = 0, published: dict[str, Any] | None = None) -> Path:
    """A folder below `root` that the services can serve with random weights. Overwrites what is there.

    `published`: config.json, in place of the shape's.
    """
    folder = root / (f"{shape.name}-{max_position}" if max_position else shape.name)
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(shape, max_position)
    if published is not None:
        own = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
        config = published | own | ({"max_position_embeddings": max_position} if max_position else {})
    settings = {
        "add_bos_token": False,
        "bos_token": "<|begin|>",
        "chat_template": TEMPLATE,
        "eos_token": "<|end|>",
        "model_max_length": config["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    files = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer_config.json": settings,
        "tokenizer.json": tokenizer_of(shape),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False))
    return folder


def find_model(name: str, max_position: int = 0) -> str:
    """`model.source` for a name of SHAPES or PUBLISHED, made in the temporary folder; any other is one already."""
    root = Path(tempfile.gettempdir()) / "valence-benchmarks"
    if name in PUBLISHED:
        return str(write_model(root, PUBLISHED[name].shape, max_position, PUBLISHED[name].config))
    return str(write_model(root, SHAPES[name], max_position)) if name in SHAPES else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*SHAPES, *PUBLISHED])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-position", type=int, default=0)
    arguments = parser.parse_args()
    known = PUBLISHED.get(arguments.model)
    shape, config = known if known is not None else (SHAPES[arguments.model], None)
    print(write_model(arguments.folder, shape, arguments.max_position, config))


if __name__ == "__main__":
    main()
