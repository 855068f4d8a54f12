import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from common.errors import ConfigError
from services.worker.gguf_file import LAYER_NAMES, TOP_NAMES
from services.worker.models.registry import find_model
from services.worker.models.spec import Config
from services.worker.source import open_model


def gguf_name(name: str) -> str:
    """Hugging Face's name -> llama.cpp's."""
    stem, _, suffix = name.rpartition(".")
    for gguf_stem, hf_stem in TOP_NAMES.items():
        if stem == hf_stem:
            return f"{gguf_stem}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return next(f"blk.{layer}.{key}.{suffix}" for key, value in LAYER_NAMES.items() if value == part)


def write_gguf(path: Path, reference: Any, storage: str) -> Path:
    """A transformers Llama as llama.cpp's converter writes it: q and k rows in interleaved order."""
    config = reference.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(config.eos_token_id)
    for name, parameter in reference.state_dict().items():
        values = parameter.detach().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        kind = gguf.GGMLQuantizationType[storage if values.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def reference() -> Any:
    import transformers

    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        eos_token_id=2,
        rms_norm_eps=2.0**-20,  # the same number in the fp32 of a GGUF file
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


# Relative error of each storage's own rounding, with a margin.
@pytest.mark.parametrize(("storage", "tolerance"), [("F32", 0.0), ("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 1.5e-2)])
def test_gguf_and_safetensors_of_one_model_agree(
    reference: Any, storage: str, tolerance: float, tmp_path: Path
) -> None:
    reference.save_pretrained(tmp_path / "tiny")
    folder = open_model(str(tmp_path / "tiny"))
    file = open_model(str(write_gguf(tmp_path / "tiny.gguf", reference, storage)))
    assert sorted(folder.tensors) == sorted(file.tensors)
    for name, tensor in folder.tensors.items():
        expected, found = tensor.dense(torch.float32), file.tensors[name].dense(torch.float32)
        assert torch.equal(expected, reference.state_dict()[name])
        assert (expected - found).norm() <= tolerance * expected.norm(), name
    _, model = find_model(["LlamaForCausalLM"])
    assert model.read(Config(folder.config)) == model.read(Config(file.config))
    assert (folder.name, file.name) == ("tiny", "tiny")
    assert folder.eos_token_ids == file.eos_token_ids == (2,)
    assert folder.max_model_len == file.max_model_len == 128


def test_shards_are_the_whole_model(reference: Any, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    tensors = open_model(str(tmp_path / "shards")).tensors
    state = reference.state_dict()
    assert sorted(tensors) == sorted(state)
    assert all(torch.equal(tensors[name].dense(torch.float32), state[name]) for name in state)


def test_generation_config_decides_the_ends(make_tiny: Callable[[str], Any], tmp_path: Path) -> None:
    make_tiny("llama").reference.save_pretrained(tmp_path)
    ends = {"eos_token_id": [7, 3, 7]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    assert open_model(str(tmp_path)).eos_token_ids == (3, 7)
    (tmp_path / "generation_config.json").unlink()
    assert open_model(str(tmp_path)).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(ConfigError, match="eos_token_id is 'two'"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("text", ["", "[1]", "\xff"])
def test_config_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_model(str(tmp_path))


def test_llama3_factors_in_a_gguf(reference: Any, tmp_path: Path) -> None:
    from services.worker.gguf_config import llama3_factor

    writer = gguf.GGUFWriter(tmp_path / "llama3.gguf", "llama")
    for key, value in {"block_count": 1, "context_length": 131072, "embedding_length": 64}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    factors = [llama3_factor(500000.0 ** (-2 * i / 16), 32.0) for i in range(8)]
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((96, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_model(str(tmp_path / "llama3.gguf"))
    scaling = source.config["rope_scaling"]
    assert isinstance(scaling, dict)
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 32.0)
    assert sorted(source.tensors) == ["model.embed_tokens.weight"]


def test_bundled() -> None:
    source = open_model("bundled")
    assert source.name == "SmolLM2-135M-Instruct"
    assert source.config["architectures"] == ["LlamaForCausalLM"]
    assert source.eos_token_ids == (2,)
    assert source.max_model_len == 8192
    assert len(source.tensors) == 272
