import json
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.errors import ConfigError
from services.worker.safetensors_file import read_folder

A, B = torch.arange(6.0).view(2, 3), torch.full((4,), 0.5, dtype=torch.bfloat16)


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_single_file(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    save_file({"a": A}, tmp_path / "consolidated.safetensors")  # the same model in another layout: not read
    tensors = read_folder(tmp_path)
    assert {name: (tensor.shape, tensor.storage) for name, tensor in tensors.items()} == {
        "a": ((2, 3), "F32"),
        "b": ((4,), "BF16"),
    }
    dense = tensors["a"].dense(torch.float32)
    assert torch.equal(dense, A)
    dense.zero_()  # a copy: the mapped file is untouched
    assert torch.equal(tensors["a"].dense(torch.float32), A)
    assert torch.equal(tensors["b"].dense(torch.float32), B.float())
    assert "model.safetensors" in tensors["a"].source


def test_a_part_is_read_alone(tmp_path: Path) -> None:
    whole = torch.arange(48.0).view(6, 8)
    save_file({"a": whole, "b": B}, tmp_path / "model.safetensors")
    tensors = read_folder(tmp_path)
    for tensor, wanted in (
        (tensors["a"].narrow(0, 2, 5), whole[2:5]),  # type: ignore[attr-defined]
        (tensors["a"].narrow(1, 3, 8), whole[:, 3:]),  # type: ignore[attr-defined]
        (tensors["a"].narrow(0, 1, 6).narrow(1, 2, 6).narrow(0, 1, 3), whole[2:4, 2:6]),  # type: ignore[attr-defined]
        (tensors["b"].narrow(0, 1, 3), B.float()[1:3]),  # type: ignore[attr-defined]
    ):
        values = tensor.dense(torch.float32)
        assert tensor.shape == values.shape and torch.equal(values, wanted) and values.is_contiguous()
    assert tensors["a"].shape == (6, 8)


def test_shards(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": B, "unlisted": B.clone()}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    tensors = read_folder(tmp_path)
    assert sorted(tensors) == ["a", "b"]
    assert torch.equal(tensors["b"].dense(torch.bfloat16), B)


def test_shards_without_an_index(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model-1.safetensors")
    save_file({"b": B}, tmp_path / "model-2.safetensors")
    assert sorted(read_folder(tmp_path)) == ["a", "b"]
    save_file({"a": A}, tmp_path / "model-3.safetensors")
    with pytest.raises(ConfigError, match=r'"a" is both in .*model-1.* and in .*model-3'):
        read_folder(tmp_path)


def test_index_errors_name_the_file(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(ConfigError, match=r'"b" is in one\.safetensors, but it is not there'):
        read_folder(tmp_path)
    write_index(tmp_path, {"a": "missing.safetensors"})
    with pytest.raises(ConfigError, match=r"missing\.safetensors"):
        read_folder(tmp_path)
    for outside in ("../one.safetensors", "/etc/passwd", 3):
        write_index(tmp_path, {"a": outside})
        with pytest.raises(ConfigError, match="not a name in this folder"):
            read_folder(tmp_path)
    for name in ("\0", "x" * 999, "\ud800"):
        write_index(tmp_path, {"a": name})
        with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
            read_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[" * 99_999)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_folder(tmp_path)
    write_index(tmp_path, [])
    with pytest.raises(ConfigError, match="no weight_map"):
        read_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_folder(tmp_path)


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        read_folder(tmp_path)


def header(content: dict[str, object], payload: bytes = b"") -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + payload


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x01",
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 2) + b"{]",
        header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
        header({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}, bytes(8)),
    ],
)
def test_hostile_file_is_a_clear_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        read_folder(tmp_path)


def test_storage_without_meaning_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    tensor = read_folder(tmp_path)["a"]
    with pytest.raises(ConfigError, match='"a" is stored as I8'):
        tensor.dense(torch.float32)
    with pytest.raises(ValueError, match="not in blocks"):
        tensor.blocks()
