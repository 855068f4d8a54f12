"""The Hugging Face style config that a GGUF file's metadata stands for. Pure, called by source.py.

llama.cpp keeps Llama-3's rope scaling only as the factors it leads to (a tensor); they are turned back into the
parameters, and refused when no known parameters lead to them.
"""

import math
from collections.abc import Sequence

from common.errors import ConfigError
from common.gguf_metadata import GgufFile, Value

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Ends of a turn that files converted before `eot_token_id` existed name only in their vocabulary.
END_OF_TURN_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
# Llama 3.1 and later; only the factor differs between their sizes.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


def hf_config(file: GgufFile, rope_factors: Sequence[float] | None) -> dict[str, object]:
    """config.json's content for `file`. `rope_factors`: the values of its "rope_freqs.weight", if it has that tensor.

    Raises ConfigError naming a key that is missing, of a wrong type, or of a meaning that is not supported.
    """
    architecture = text(file, "general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f'{file.path}: architecture "{architecture}" is not supported (supported: {known})')
    heads = number(file, f"{architecture}.attention.head_count")
    hidden = number(file, f"{architecture}.embedding_length")
    head_dim = number(file, f"{architecture}.attention.key_length", hidden // heads if heads else 0)
    if heads <= 0 or head_dim <= 0 or hidden <= 0:
        raise ConfigError(f"{file.path}: {heads} heads of {head_dim} in a hidden size of {hidden}")
    value_dim = number(file, f"{architecture}.attention.value_length", head_dim)
    rotary_dim = number(file, f"{architecture}.rope.dimension_count", head_dim)
    if value_dim != head_dim or rotary_dim != head_dim:
        raise ConfigError(
            f"{file.path}: heads of {head_dim} for keys, {value_dim} for values, {rotary_dim} rotated: not supported"
        )
    theta = real(file, f"{architecture}.rope.freq_base", 10000.0)
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": number(file, f"{architecture}.feed_forward_length"),
        "num_hidden_layers": number(file, f"{architecture}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number(file, f"{architecture}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": real(file, f"{architecture}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": number(file, f"{architecture}.context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, architecture, theta, head_dim, rope_factors),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": file.metadata.get(f"{architecture}.attention.sliding_window"),
    }


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Tokens that end an answer: end of text, of turn and of message, as far as the file knows them."""
    ids = [
        value
        for key in ("eos_token_id", "eot_token_id", "eom_token_id")
        if isinstance(value := file.metadata.get(f"tokenizer.ggml.{key}"), int)
    ]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and "tokenizer.ggml.eot_token_id" not in file.metadata:
        ids += [tokens.index(name) for name in END_OF_TURN_TEXTS if name in tokens]
    return tuple(sorted(set(ids)))


def number(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(file, key, value, "an integer")
    return value


def real(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(file, key, value, "a finite number")
    return float(value)


def text(file: GgufFile, key: str) -> str:
    value = file.metadata.get(key)
    if not isinstance(value, str):
        raise _wrong(file, key, value, "a text")
    return value


def _wrong(file: GgufFile, key: str, value: Value | None, expected: str) -> ConfigError:
    if value is None:
        return ConfigError(f'{file.path}: metadata key "{key}" is missing')
    return ConfigError(f'{file.path}: metadata key "{key}" is {str(value)[:60]}, not {expected}')


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f'{file.path}: tensor "token_embd.weight" is missing or not a matrix')
    return embedding.shape[0]


def _rope_scaling(
    file: GgufFile, architecture: str, theta: float, head_dim: int, factors: Sequence[float] | None
) -> dict[str, object] | None:
    if factors is not None:
        return _llama3_scaling(file, theta, head_dim, factors)
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f'{file.path}: rope scaling "{kind}" is not supported')
    scaling: dict[str, object] = {
        "rope_type": kind,
        "factor": real(file, f"{architecture}.rope.scaling.factor"),
    }
    original = f"{architecture}.rope.scaling.original_context_length"
    if original in file.metadata:
        scaling["original_max_position_embeddings"] = number(file, original)
    return scaling


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int, factors: Sequence[float]) -> dict[str, object]:
    factor = max(factors, default=0.0)
    if not 0 < factor < math.inf or theta <= 0:
        raise ConfigError(f'{file.path}: the rope factors in "rope_freqs.weight" go up to {factor}: not supported')
    expected = [llama3_factor(theta ** (-2 * i / head_dim), factor) for i in range(head_dim // 2)]
    close = len(factors) == len(expected) and all(
        math.isclose(found, wanted, rel_tol=1e-3) for found, wanted in zip(factors, expected, strict=True)
    )
    if not close:
        raise ConfigError(
            f'{file.path}: the rope factors in "rope_freqs.weight" are not those of Llama 3: not supported'
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }


def llama3_factor(frequency: float, factor: float) -> float:
    """By how much Llama 3's rope scaling divides `frequency` (radians per token); Meta's published formula."""
    turns = LLAMA3_CONTEXT * frequency / (2 * math.pi)
    if turns > LLAMA3_HIGH:
        return 1.0
    if turns < LLAMA3_LOW:
        return factor
    smooth = (turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
