from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from common.errors import ConfigError
from common.gguf_metadata import read_gguf
from services.worker import gguf_file
from services.worker.gguf_file import hf_name, read_tensors

PLAIN = ("F32", "F16", "BF16")
BLOCKS_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
BLOCKS_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def stored(storage: str, rows: int, columns: int) -> np.ndarray:
    """Random contents of `storage`, uint8 [rows, bytes of a row] (or the dtype itself for F32, F16)."""
    random = np.random.default_rng(7)
    kind = gguf.GGMLQuantizationType[storage]
    if storage not in BLOCKS_256:
        return gguf.quantize(random.standard_normal((rows, columns), dtype=np.float32), kind)
    # The library has no encoder for these: random bytes, with the fp16 scales replaced by tame ones.
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, columns // elements, num_bytes), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[storage]
    for place in places:
        scales = random.uniform(0.01, 0.1, blocks.shape[:2]).astype("<f2")
        blocks[..., place : place + 2] = scales.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(rows, -1)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str]], **metadata: int | str) -> Path:
    writer = gguf.GGUFWriter(path, str(metadata.pop("architecture", "qwen2")))
    for key, value in metadata.items():
        writer.add_uint32(key.replace("__", "."), int(value))
    for name, (content, storage) in tensors.items():
        writer.add_tensor(name, content, raw_dtype=gguf.GGMLQuantizationType[storage])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("storage", [*PLAIN, *BLOCKS_32, *BLOCKS_256])
def test_every_format_is_what_the_gguf_library_says(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "CHUNK_ELEMENTS", 1024)  # several chunks, the last one shorter
    content = stored(storage, 5, 512)
    path = write(tmp_path / "one.gguf", {"blk.0.ffn_up.weight": (content, storage)})
    tensor = read_tensors(read_gguf(path))["model.layers.0.mlp.up_proj.weight"]
    assert (tensor.shape, tensor.storage) == ((5, 512), storage)
    expected = torch.from_numpy(gguf.dequantize(content, gguf.GGMLQuantizationType[storage]).copy())
    assert torch.equal(tensor.dense(torch.float32), expected)
    assert torch.equal(tensor.dense(torch.bfloat16), expected.bfloat16())
    if storage in PLAIN:
        with pytest.raises(ValueError, match="not in blocks"):
            tensor.blocks()
    else:
        assert np.array_equal(tensor.blocks().numpy(), content)


@pytest.mark.parametrize("storage", ["F32", "BF16", "Q4_1", "Q8_0", "Q4_K"])
def test_parts_stay_as_they_are_stored(storage: str, tmp_path: Path) -> None:
    """Unless they begin or end within a block."""
    path = write(tmp_path / "one.gguf", {"blk.0.ffn_down.weight": (stored(storage, 6, 512), storage)})
    whole = read_tensors(read_gguf(path))["model.layers.0.mlp.down_proj.weight"]
    values = whole.dense(torch.float32)
    rows, columns = whole.narrow(0, 1, 5), whole.narrow(1, 256, 512)  # type: ignore[attr-defined]
    both = columns.narrow(0, 2, 3)
    for part, wanted in ((rows, values[1:5]), (columns, values[:, 256:]), (both, values[2:3, 256:])):
        assert (part.storage, part.shape) == (storage, wanted.shape)
        assert torch.equal(part.dense(torch.float32), wanted)
    if storage not in PLAIN:
        assert torch.equal(columns.blocks(), whole.blocks()[:, whole.blocks().shape[1] // 2 :])
        odd = whole.narrow(1, 8, 500)  # type: ignore[attr-defined]
        assert odd.storage == "F32" and torch.equal(odd.dense(torch.float32), values[:, 8:500])


def test_vectors_keep_their_shape(tmp_path: Path) -> None:
    path = write(tmp_path / "norm.gguf", {"output_norm.weight": (np.arange(6, dtype=np.float32), "F32")})
    norm = read_tensors(read_gguf(path))["model.norm.weight"]
    assert norm.dense(torch.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert norm.narrow(0, 2, 5).dense(torch.float32).tolist() == [2, 3, 4]  # type: ignore[attr-defined]


@pytest.mark.parametrize("storage", ["F32", "Q8_0"])
def test_rope_order_of_llama_is_undone(storage: str, tmp_path: Path) -> None:
    heads, kv_heads, head_dim, hidden = 4, 2, 8, 32

    def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
        """As llama.cpp's converter stores q and k: the two halves of a head alternate row by row."""
        halves = rows.reshape(num_heads, 2, head_dim // 2, *rows.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))

    random = np.random.default_rng(3)
    kind = gguf.GGMLQuantizationType[storage]
    wanted = {
        name: random.standard_normal((rows, hidden), dtype=np.float32)
        for name, rows in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim))
    }
    bias = random.standard_normal(heads * head_dim, dtype=np.float32)
    tensors = {
        "blk.0.attn_q.weight": (gguf.quantize(interleaved(wanted["q"], heads), kind), storage),
        "blk.0.attn_k.weight": (gguf.quantize(interleaved(wanted["k"], kv_heads), kind), storage),
        "blk.0.attn_v.weight": (gguf.quantize(wanted["v"], kind), storage),
        "blk.0.attn_q.bias": (interleaved(bias, heads), "F32"),
    }
    counts = {"llama__attention__head_count": heads, "llama__attention__head_count_kv": kv_heads}
    found = read_tensors(read_gguf(write(tmp_path / "rope.gguf", tensors, architecture="llama", **counts)))
    for name, rows in wanted.items():
        expected = gguf.dequantize(gguf.quantize(rows, kind), kind)
        tensor = found[f"model.layers.0.self_attn.{name}_proj.weight"]
        assert np.array_equal(tensor.dense(torch.float32).numpy(), expected), name
        part = tensor.narrow(0, head_dim, 2 * head_dim)  # type: ignore[attr-defined]
        assert np.array_equal(part.dense(torch.float32).numpy(), expected[head_dim : 2 * head_dim]), "one head"
    half = found["model.layers.0.self_attn.q_proj.bias"].narrow(0, 0, head_dim)  # type: ignore[attr-defined]
    assert np.array_equal(half.dense(torch.float32).numpy(), bias[:head_dim])
    assert np.array_equal(found["model.layers.0.self_attn.q_proj.bias"].dense(torch.float32).numpy(), bias)
    if storage == "Q8_0":
        blocks = found["model.layers.0.self_attn.q_proj.weight"].blocks()
        assert np.array_equal(blocks.numpy(), gguf.quantize(wanted["q"], kind))


def test_other_architectures_are_left_as_they_are(tmp_path: Path) -> None:
    rows = np.random.default_rng(3).standard_normal((32, 32), dtype=np.float32)
    path = write(tmp_path / "qwen.gguf", {"blk.0.attn_q.weight": (rows, "F32")}, qwen2__attention__head_count=4)
    tensor = read_tensors(read_gguf(path))["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(tensor.dense(torch.float32).numpy(), rows)


def test_rows_that_do_not_divide_into_heads_are_named(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight": (np.zeros((30, 32), dtype=np.float32), "F32")}
    path = write(tmp_path / "odd.gguf", tensors, architecture="llama", llama__attention__head_count=4)
    with pytest.raises(ConfigError, match=r"attn_q\.weight.*30 rows.*4 heads"):
        read_tensors(read_gguf(path))


def test_names() -> None:
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert hf_name("blk.0.attn_k_norm.weight") == "model.layers.0.self_attn.k_norm.weight"
    assert hf_name("blk.0.attn_q.bias") == "model.layers.0.self_attn.q_proj.bias"
    for unknown in ("blk.x.attn_q.weight", "blk.0.ffn_gate_exps.weight", "output_norm.scale", "weight"):
        assert hf_name(unknown) is None


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "moe.gguf", {"blk.0.ffn_gate_inp.weight": (np.zeros((4, 32), dtype=np.float32), "F32")})
    with pytest.raises(ConfigError, match=r"ffn_gate_inp\.weight"):
        read_tensors(read_gguf(path))
