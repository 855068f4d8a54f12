import math
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.gguf_metadata import GgufFile, TensorRecord, Value
from services.worker.gguf_config import eos_token_ids, hf_config, llama3_factor

LLAMA: dict[str, Value] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
}


def file(changes: dict[str, Value] | None = None, *tensors: str, without: str = "") -> GgufFile:
    metadata = {key: value for key, value in (LLAMA | (changes or {})).items() if key != without}
    names = {"token_embd.weight": (131, 64)} | dict.fromkeys(tensors, (64,))
    records = {name: TensorRecord(name, "F32", shape, 0, 0) for name, shape in names.items()}
    return GgufFile(Path("tiny.gguf"), metadata, records)


def test_llama() -> None:
    config = hf_config(file(), None)
    assert config["architectures"] == ["LlamaForCausalLM"]
    expected = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    assert {key: config[key] for key in expected} == expected


def test_what_tensors_tell() -> None:
    config = hf_config(file(None, "output.weight", "blk.0.attn_q.bias"), None)
    assert config["tie_word_embeddings"] is False
    assert config["attention_bias"] is True


def test_head_size_of_its_own() -> None:
    changes: dict[str, Value] = {
        "general.architecture": "qwen3",
        **{key.replace("llama.", "qwen3."): value for key, value in LLAMA.items() if key.startswith("llama.")},
        "qwen3.attention.key_length": 32,
        "qwen3.attention.value_length": 32,
    }
    config = hf_config(file(changes), None)
    assert (config["architectures"], config["head_dim"]) == (["Qwen3ForCausalLM"], 32)


def test_llama3_scaling_is_found_again() -> None:
    factors = [llama3_factor(500000.0 ** (-2 * i / 16), 8.0) for i in range(8)]
    assert min(factors) == 1.0
    config = hf_config(file(), factors)
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(ConfigError, match="rope_freqs"):
        hf_config(file(), [factor * 1.1 for factor in factors])
    with pytest.raises(ConfigError, match="rope_freqs"):
        hf_config(file(), factors[:-1])


@pytest.mark.parametrize("factors", [[0.0] * 8, [math.nan] * 8, [math.inf] * 8, [-1.0], []])
def test_factors_that_are_none(factors: list[float]) -> None:
    with pytest.raises(ConfigError, match="rope factors"):
        hf_config(file(), factors)


def test_llama3_factor_is_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    for i, frequency in enumerate(scaled.tolist()):
        plain = 500000.0 ** (-2 * i / 128)
        assert math.isclose(plain / llama3_factor(plain, 32.0), frequency, rel_tol=1e-5)


def test_scaling_by_name() -> None:
    changes: dict[str, Value] = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    assert hf_config(file(changes), None)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert hf_config(file({"llama.rope.scaling.type": "none"}), None)["rope_scaling"] is None
    with pytest.raises(ConfigError, match='rope scaling "longrope"'):
        hf_config(file({"llama.rope.scaling.type": "longrope"}), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, '"mamba" is not supported.*llama'),
        ({"llama.block_count": "two"}, "llama.block_count.*two, not an integer"),
        ({"llama.block_count": True}, "not an integer"),
        ({"llama.attention.head_count": 0}, "0 heads"),
        ({"llama.rope.freq_base": math.nan}, "not a finite number"),
        ({"llama.rope.dimension_count": 8}, "8 rotated: not supported"),
        ({"llama.attention.value_length": 32}, "32 for values"),
        ({"general.architecture": 3}, "not a text"),
    ],
)
def test_errors_name_the_key(changes: dict[str, Value], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hf_config(file(changes), None)


def test_missing_keys_and_tensors() -> None:
    with pytest.raises(ConfigError, match=r"llama\.context_length.*missing"):
        hf_config(file(without="llama.context_length"), None)
    with pytest.raises(ConfigError, match="token_embd"):
        hf_config(GgufFile(Path("tiny.gguf"), LLAMA, {}), None)


def test_ends() -> None:
    tokens: list[Value] = ["<s>", "</s>", "a", "<|eot_id|>", "<|im_end|>"]
    eos: dict[str, Value] = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.tokens": tokens}
    assert eos_token_ids(file()) == ()
    assert eos_token_ids(file(eos)) == (1, 3, 4)
    assert eos_token_ids(file(eos | {"tokenizer.ggml.eot_token_id": 3})) == (1, 3)
    assert eos_token_ids(file(eos | {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 2})) == (1, 2)
