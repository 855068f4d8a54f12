import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.gguf_metadata import GgufError, read_gguf
from common.model_source import resolve


def string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def header(num_tensors: int = 0, num_keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def key(name: str, type_code: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", type_code) + payload


def record(name: str, dims: list[int], type_code: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_code, offset)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.epsilon", 0.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "é", "", "🙂"])
    writer.add_array("tokenizer.ggml.token_type", [3, -1, 1, 6])
    writer.add_array("tokenizer.ggml.scores", [0.5, -2.0])
    writer.add_array("flags", [True, False])
    writer.add_tensor("output_norm.weight", np.arange(6, dtype=np.float32))
    writer.add_tensor("token_embd.weight", np.ones((3, 8), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_the_gguf_library_writes(written: Path) -> None:
    file = read_gguf(written)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["llama.epsilon"] == 0.5
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "é", "", "🙂"]
    assert file.metadata["tokenizer.ggml.token_type"] == [3, -1, 1, 6]
    assert file.metadata["tokenizer.ggml.scores"] == [0.5, -2.0]
    assert file.metadata["flags"] == [True, False]
    embedding = file.tensors["token_embd.weight"]
    assert (embedding.storage, embedding.shape, embedding.num_bytes) == ("F16", (3, 8), 48)
    norm = file.tensors["output_norm.weight"]
    content = written.read_bytes()[norm.offset : norm.offset + norm.num_bytes]
    assert np.frombuffer(content, dtype="<f4").tolist() == [0, 1, 2, 3, 4, 5]


def test_agrees_with_the_gguf_library_on_the_bundled_model() -> None:
    file = read_gguf(resolve("bundled").path)
    assert file.metadata["general.architecture"] == "llama"
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert len(tokens) == 49152
    assert len(file.tensors) == 272
    for tensor in file.tensors.values():
        quantization = gguf.GGMLQuantizationType[tensor.storage]
        byte_shape = gguf.quant_shape_to_byte_shape(tensor.shape, quantization)
        assert tensor.num_bytes == np.prod(byte_shape)


HOSTILE = {
    "empty": (b"", "empty"),
    "other format": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "cut in the header": (b"GGUF\x03\x00", "cut short"),
    "old version": (header(version=1), "version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "absurd key count": (header(num_keys=2**60), "cannot fit"),
    "absurd tensor count": (header(num_tensors=2**63), "cannot fit"),
    "absurd string": (header(num_keys=1) + string("a") + struct.pack("<IQ", 8, 2**63) + bytes(8), '"a": a string of'),
    "long key": (header(num_keys=1) + struct.pack("<Q", 2**40) + bytes(64), "a key of"),
    "key is not text": (header(num_keys=1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(64), "not UTF-8"),
    "unknown value type": (header(num_keys=1) + key("a", 99, bytes(8)), "value type 99"),
    "unknown entry type": (
        header(num_keys=1) + key("a", 9, struct.pack("<IQ", 77, 1) + bytes(9)),
        "entries of type 77",
    ),
    "absurd array": (header(num_keys=1) + key("a", 9, struct.pack("<IQ", 4, 2**62)), "array entries"),
    "array cut short": (header(num_keys=1) + key("a", 9, struct.pack("<IQ", 12, 3) + bytes(9)), "cut short"),
    "strings cut short": (
        header(num_keys=1) + key("a", 9, struct.pack("<IQ", 8, 2) + string("x") + struct.pack("<Q", 2**63)),
        "entry 1 of 2",
    ),
    "strings end early": (
        header(num_keys=1) + key("a", 9, struct.pack("<IQ", 8, 3) + string("x") * 2),
        "of 3 lies behind",
    ),
    "entry is not text": (
        header(num_keys=1) + key("a", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 1) + b"\xff"),
        "entry 0 is not UTF-8",
    ),
    "deep nesting": (header(num_keys=1) + key("a", 9, struct.pack("<IQ", 9, 1) * 30), "nested"),
    "repeated key": (header(num_keys=2) + key("a", 4, bytes(4)) * 2, "twice"),
    "odd alignment": (header(num_keys=1) + key("general.alignment", 4, struct.pack("<I", 33)), "power of two"),
    "zero alignment": (header(num_keys=1) + key("general.alignment", 4, bytes(4)), "power of two"),
    "repeated tensor": (header(num_tensors=2) + record("t", [1], 0, 0) * 2, "appears twice"),
    "no dimensions": (header(num_tensors=1) + record("t", [], 0, 0), "0 dimensions"),
    "many dimensions": (header(num_tensors=1) + record("t", [1] * 9, 0, 0), "9 dimensions"),
    "zero extent": (header(num_tensors=1) + record("t", [0, 4], 0, 0), "impossible"),
    "half a block": (header(num_tensors=1) + record("t", [33], 3, 0), "impossible for Q4_1"),
    "unknown type": (header(num_tensors=1) + record("t", [32], 36, 0), "type 36"),
    "offset behind the end": (header(num_tensors=1) + record("t", [32], 0, 2**40), '"t".*behind the file'),
    "size behind the end": (header(num_tensors=1) + record("t", [2**62, 2**62], 0, 0), '"t".*behind the file'),
    "not aligned": (header(num_tensors=1) + record("t", [1], 0, 4), "not aligned"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_a_clear_error(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="No such file"):
        read_gguf(tmp_path / "missing.gguf")


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 600), edits=st.lists(st.tuples(st.integers(0, 599), st.integers(0, 255)), max_size=4))
def test_damaged_file_reads_or_is_refused(
    cut: int, edits: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "damaged.gguf"
    content = bytearray(
        header(num_tensors=1, num_keys=3)
        + key("general.architecture", 8, string("llama"))
        + key("tokens", 9, struct.pack("<IQ", 8, 3) + string("a") + string("bc") + string(""))
        + key("types", 9, struct.pack("<IQ", 5, 2) + bytes(8))
        + record("token_embd.weight", [32, 2], 3, 0)
        + bytes(300)
    )
    for position, byte in edits:
        content[position % len(content)] = byte
    path.write_bytes(content[: len(content) - cut] if cut < len(content) else b"")
    try:
        file = read_gguf(path)
    except GgufError:
        return
    assert all(tensor.offset + tensor.num_bytes <= path.stat().st_size for tensor in file.tensors.values())
