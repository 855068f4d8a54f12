# ruff: noqa: PT017 (what an error says is part of the case)
"""Checkpoints and tokenizers that are damaged or lie: a GGUF file, and a folder with safetensors and JSON files.

Each case changes one thing of a tiny good model, in its bytes or in its meaning, and loads it as worker and tokenizer
do. It must load or be a ConfigError that names the file, within `CASE_S` and `CASE_BYTES` more of memory.
"""

import json
import resource
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from common.config import Config, Model, load
from common.errors import ConfigError
from services.tokenizer import source as tokenizer_source
from services.worker.layers.rope import RopeTable
from services.worker.model_engine import _shape, load_model
from services.worker.source import open_model
from services.worker.startup import Stages, explained
from tests.fuzz import mutate

CASE_S = 30
CASE_BYTES = 3 << 30
CPU = torch.device("cpu")
HIDDEN, INNER, VOCAB, HEADS = 32, 64, 40, 4
NUMBERS = (*mutate.EDGES, 2**40, 10**30, 31, 33)
TEXTS = (*mutate.TEXTS, "llama", "gpt2", "bert", "\ud800", "{% for %}", "{{ messages }}")
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
}
GGUF_NAMES = (
    "token_embd",
    "output_norm",
    "blk.0.attn_norm",
    "blk.0.ffn_norm",
    "blk.0.attn_q",
    "blk.0.attn_k",
    "blk.0.attn_v",
    "blk.0.attn_output",
    "blk.0.ffn_gate",
    "blk.0.ffn_up",
    "blk.0.ffn_down",
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HIDDEN // HEADS,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "eos_token_id": [2],
}
WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    *"abcdefghijklmnopqrstuvwxyz",
    "ab",
    "bc",
    "abc",
    "Ġ",
    "Ġa",
    "ĠĠ",
    "x1",
    "x2",
    "x3",
    "x4",
    "x5",
]
MERGES = ["a b", "b c", "ab c", "Ġ a", "Ġ Ġ"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@dataclass
class Gguf:
    """A GGUF file before it is written: every number in it can be a lie."""

    metadata: dict[str, Any]
    records: list[tuple[str, list[int], int, int]]  # name, dims, type, offset
    payload: bytes
    version: int = 3
    num_tensors: int | None = None
    num_keys: int | None = None

    def encode(self) -> bytes:
        keys = [_string(key) + _value(value) for key, value in self.metadata.items()]
        count = len(self.records) if self.num_tensors is None else self.num_tensors
        head = struct.pack("<4sIQQ", b"GGUF", self.version, count % 2**64, (self.num_keys or len(keys)) % 2**64)
        for name, dims, kind, offset in self.records:
            numbers = struct.pack(f"<I{len(dims)}Q", len(dims), *(dim % 2**64 for dim in dims))
            keys.append(_string(name) + numbers + struct.pack("<IQ", kind % 2**32, offset % 2**64))
        head += b"".join(keys)
        return head + bytes(-len(head) % 32) + self.payload


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    kind, content = _typed(value)
    return struct.pack("<I", kind) + content


def _typed(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, int):
        return (10, struct.pack("<Q", value % 2**64)) if value >= 0 else (11, struct.pack("<q", max(value, -(2**63))))
    if isinstance(value, float):
        return 12, struct.pack("<d", value)
    if isinstance(value, list):
        kinds = [_typed(entry) for entry in value]
        kind = kinds[0][0] if kinds else 4
        same = [content for each, content in kinds if each == kind]
        return 9, struct.pack("<IQ", kind, len(same)) + b"".join(same)
    return 8, _string(value if isinstance(value, str) else json.dumps(value))


def good_gguf() -> Gguf:
    records, offset = [], 0
    for name, shape in zip(GGUF_NAMES, SHAPES.values(), strict=True):
        records.append((f"{name}.weight", list(reversed(shape)), 0, offset))
        offset += torch.Size(shape).numel() * 4
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 1,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 64,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": WORDS[:VOCAB],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (VOCAB - 3),
        "tokenizer.ggml.scores": [0.5] * VOCAB,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
    }
    return Gguf(metadata, records, bytes(offset))


def good_folder(folder: Path) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model-1.safetensors")
    model = {"type": "BPE", "vocab": {word: i for i, word in enumerate(WORDS[:VOCAB])}, "merges": MERGES}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": WORDS[i], "special": True, "single_word": False}
            | {"lstrip": False, "rstrip": False, "normalized": False}
            for i in range(3)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": model,
    }
    written = {
        "config.json": CONFIG,
        "generation_config.json": {"eos_token_id": [2]},
        "model.safetensors.index.json": {"weight_map": dict.fromkeys(SHAPES, "model-1.safetensors")},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE},
        "special_tokens_map.json": {"unk_token": "<unk>"},
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content))


def odd(random: Random) -> Any:
    return random.choice(
        (
            random.choice(NUMBERS),
            random.choice(NUMBERS),
            random.choice(mutate.REALS),
            random.choice(TEXTS),
            [],
            [random.choice(NUMBERS)],
            [random.choice(TEXTS)] * 3,
            [[[[[1]]]]],
            {},
            {"type": "BPE"},
            None,
            True,
        )
    )


def gguf_case(random: Random, folder: Path) -> Path:
    """A GGUF file with something wrong in it."""
    file = good_gguf()
    place = random.randrange(len(file.records))
    name, dims, kind, offset = file.records[place]
    match random.randrange(10):
        case 0 | 1 | 2:
            file.metadata[random.choice(list(file.metadata))] = odd(random)
        case 3:
            del file.metadata[random.choice(list(file.metadata))]
        case 4:
            file.num_tensors, file.num_keys = random.choice(((None, 2**40), (2**60, None), (0, None), (5, 3)))
        case 5:
            dims = random.choice(
                ([0], [2**63, 2**63], [2**32] * 4, [1], [], [HIDDEN] * 5, [3, 3], [2**61, 8], dims[::-1])
            )
            file.records[place] = (name, dims, kind, offset)
        case 6:
            file.records[place] = (name, dims, random.choice((1, 2, 8, 14, 30, 99, -1)), offset)
        case 7:
            wrong = random.choice((offset + 1, 2**62, len(file.payload), -32, 0))
            file.records[place] = (name, dims, kind, wrong)
        case 8:
            other = random.choice(
                (file.records[0][0], "blk.0.nothing.weight", "../x", "", "rope_freqs.weight", "x" * 2000)
            )
            file.records[place] = (other, dims, kind, offset)
        case 9:
            key = random.choice(("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"))
            listed = list(file.metadata[key])
            listed[random.randrange(len(listed))] = random.choice((*TEXTS, "a", "a a", -1, 2**31, 99))
            file.metadata[key] = listed
    content = file.encode()
    if random.random() < 0.25:
        content = mutate.frame(random, content[: len(content) - len(file.payload)]) + file.payload
    if random.random() < 0.15:
        content = content[: random.randrange(len(content))]
    path = folder / "odd.gguf"
    path.write_bytes(content)
    return path


def folder_case(random: Random, folder: Path) -> Path:
    """A folder with one odd file."""
    good_folder(folder)
    names = sorted(path.name for path in folder.iterdir())
    path = folder / random.choice(names)
    if path.suffix == ".safetensors":
        path.write_bytes(_odd_safetensors(random, path.read_bytes()))
        return folder
    content = json.loads(path.read_text())
    match random.randrange(8):
        case 0:
            path.write_bytes(mutate.frame(random, path.read_bytes()))
            return folder
        case 1:
            path.write_bytes(random.choice((b"", b"null", b"[]", b"\xff", b"[" * 100_000, b"9" * 5000, b'{"a": NaN}')))
            return folder
        case 2:
            path.unlink()
            path.symlink_to(random.choice(("/etc/passwd", path.name, "/dev/zero", "/nowhere", str(folder))))
            return folder
        case 3 if "weight_map" in content:
            files = ("../x.safetensors", "/etc/passwd", "model-1.safetensors/", ".", "", "\0", "x" * 999, 7, "odd.gguf")
            content["weight_map"][random.choice(list(SHAPES))] = random.choice(files)
    for _ in range(random.choice((0, 1, 1, 2))):
        content = _odd_tree(random, content)
    path.write_text(json.dumps(content))
    return folder


def _odd_tree(random: Random, good: Any) -> Any:
    """One place of the tree is another value, or is not there."""
    if isinstance(good, dict | list) and good and random.random() < 0.9:
        copy = dict(good) if isinstance(good, dict) else list(good)
        key = random.choice(list(copy)) if isinstance(copy, dict) else random.randrange(len(copy))
        if random.random() < 0.1:
            del copy[key]
        else:
            copy[key] = _odd_tree(random, copy[key])
        return copy
    return odd(random)


def _odd_safetensors(random: Random, good: bytes) -> bytes:
    size = int.from_bytes(good[:8], "little")
    header, payload = json.loads(good[8 : 8 + size]), good[8 + size :]
    match random.randrange(4):
        case 0:
            return mutate.frame(random, good[: 8 + size]) + payload
        case 1:
            return good[: random.randrange(len(good))]
        case 2:
            return random.choice((0, 2**63, 2**64 - 1, 10**8, 1)).to_bytes(8, "little") + good[8:]
    header = _odd_tree(random, header)
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + payload


@contextmanager
def bounded() -> Iterator[None]:
    """Little time, and little more memory than there is now."""

    def ring(number: int, frame: Any) -> None:
        raise TimeoutError(f"longer than {CASE_S} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(CASE_S)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + CASE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def load_all(path: Path, config: Config) -> None:
    """What a worker and a tokenizer read of a model. Raises AssertionError for an error that does not say where."""
    for read in (read_worker, read_tokenizer):
        try:
            read(path, config)
        except ConfigError as error:
            assert path.name in str(error) or "lower model.max_len" in str(error), f"does not name the file: {error}"
            assert len(str(error)) < 3000, f"a message of {len(str(error))} characters"


def read_worker(path: Path, config: Config) -> None:
    source = open_model(str(path))
    loaded = load_model(source, config, CPU, Stages(lambda stage: None), 0)
    with explained("the table of positions", "lower model.max_len"):
        RopeTable(loaded.model.spec.ropes, _shape(config, loaded.model.spec).max_len, loaded.model.final_norm.weight)


def read_tokenizer(path: Path, config: Config) -> None:
    found = tokenizer_source.load(Model(source=str(path)))
    ids = found.tokenizer.encode("abc x").ids
    if ids:
        found.vocabulary.decode(ids)


def fuzz(budget: int, first: int, advance: Callable[[], None]) -> None:
    """`budget` cases."""
    config = load(None, ["worker.kernels=['torch']", "model.dtype=float32"])
    random = Random(first)
    for _ in range(budget):
        case = random.getrandbits(63)
        folder = Path(tempfile.mkdtemp(prefix="odd-"))
        make = Random(case).choice((gguf_case, folder_case))
        try:
            path = make(Random(case), folder)
            with bounded():
                load_all(path, config)
        except (Exception, MemoryError) as error:
            error.add_note(f"tests.fuzz.files.{make.__name__}(Random({case}), folder)")
            raise
        finally:
            shutil.rmtree(folder)
        advance()
