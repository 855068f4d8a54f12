"""Checkpoint tensors of a GGUF file under their Hugging Face names, and the meaning of its block formats.

`read_tensors` gives them for the loader; bytes are read from the mapped file only when a tensor is asked for.
Block layouts: ggml's quants (ggml-common.h). llama.cpp stores the q and k rows of the "llama" architecture in the order
of its interleaved rope; `row_order` puts them back into the rotate-half order that Hugging Face checkpoints have.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import gguf
import numpy as np
import torch

from common.errors import ConfigError
from common.gguf_metadata import TENSOR_TYPES, GgufFile, TensorRecord
from services.worker.quant.contract import StoredTensor
from services.worker.quant.narrow import Part, narrowed_shape

PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCKS = {name: (elements, num_bytes) for name, elements, num_bytes in TENSOR_TYPES.values() if elements > 1}
CHUNK_ELEMENTS = 1 << 18  # dequantized at once: temporaries of 1 MiB stay in the cache
PERMUTED_ARCHITECTURES = ("llama",)

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS_NAME = "rope_freqs.weight"  # part of the configuration, see gguf_config.py


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A StoredTensor of a GGUF file. `mapped`: the whole file, uint8. `row_order[i]`: stored row of row i, or None.

    `columns`: which bytes of each row are read, first and end; None: all.
    """

    name: str
    shape: tuple[int, ...]
    storage: str
    record: TensorRecord
    file: GgufFile
    mapped: np.memmap[tuple[int], np.dtype[np.uint8]]
    row_order: torch.Tensor | None
    columns: tuple[int, int] | None = None

    @property
    def source(self) -> str:
        return f'{self.file.path} ("{self.record.name}")'

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        rows = self._rows()
        dense = torch.empty(rows.shape[0], self.shape[-1], dtype=dtype)
        chunk = max(1, CHUNK_ELEMENTS // self.shape[-1])
        for begin in range(0, rows.shape[0], chunk):
            dense[begin : begin + chunk] = dequantize(rows[begin : begin + chunk], self.storage)
        return dense.view(self.shape)

    def blocks(self) -> torch.Tensor:
        if self.storage not in BLOCKS:
            raise ValueError(f'tensor "{self.name}" is stored as {self.storage}, not in blocks')
        return self._rows()

    def _rows(self) -> torch.Tensor:
        """A copy of the stored bytes, uint8 [rows, bytes of a row]; a vector is one row."""
        record = self.record
        stored = self.mapped[record.offset : record.offset + record.num_bytes]
        if self.row_order is None or len(self.shape) == 1:
            rows = torch.empty(stored.size, dtype=torch.uint8)  # torch's memory: numpy's may wait for huge pages
            rows.numpy()[:] = stored
            if self.row_order is not None:
                return rows.view(record.shape[0], -1)[self.row_order].reshape(1, -1)
            rows = rows.view(1 if len(self.shape) == 1 else record.shape[0], -1)
            return rows[:, slice(*self.columns)].contiguous() if self.columns else rows
        ordered = stored.reshape(record.shape[0], -1)[self.row_order.numpy()]
        return torch.from_numpy(ordered[:, slice(*self.columns)] if self.columns else ordered)

    def narrow(self, dim: int, begin: int, end: int) -> StoredTensor:
        """As stored, unless the part begins or ends within a block; then the whole is read and widened."""
        shape = narrowed_shape(self.shape, dim, begin, end)
        if dim == 0 and (len(shape) > 1 or self.storage in PLAIN_DTYPES):
            order = torch.arange(self.shape[0]) if self.row_order is None else self.row_order
            return replace(self, shape=shape, row_order=order[begin:end])
        elements, num_bytes = BLOCKS.get(self.storage, (1, 0))
        num_bytes = num_bytes or PLAIN_DTYPES[self.storage].itemsize
        if len(shape) != 2 or self.columns or begin % elements or end % elements:
            return Part(self, dim, begin, end)
        columns = begin // elements * num_bytes, end // elements * num_bytes
        return replace(self, shape=shape, columns=columns)


def read_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """The tensors of `file` by Hugging Face name. Raises ConfigError for a tensor name that has no meaning here."""
    mapped = np.memmap(file.path, dtype=np.uint8, mode="r")
    tensors: dict[str, StoredTensor] = {}
    for record in file.tensors.values():
        if record.name == ROPE_FACTORS_NAME:
            continue
        name = hf_name(record.name)
        if name is None:
            raise ConfigError(f'{file.path}: tensor "{record.name}" is not known for this architecture')
        order = _row_order(file, record)
        tensors[name] = GgufTensor(name, record.shape, record.storage, record, file, mapped, order)
    return tensors


def hf_name(name: str) -> str | None:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; None if it has no counterpart."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        return None
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{suffix}"
    block, _, rest = stem.partition(".")
    index, _, part = rest.partition(".")
    if block != "blk" or not index.isdecimal() or part not in LAYER_NAMES:
        return None
    return f"model.layers.{int(index)}.{LAYER_NAMES[part]}.{suffix}"


def _row_order(file: GgufFile, record: TensorRecord) -> torch.Tensor | None:
    architecture = file.metadata.get("general.architecture")
    stem = record.name.rpartition(".")[0]
    if architecture not in PERMUTED_ARCHITECTURES or not stem.endswith((".attn_q", ".attn_k")):
        return None
    key = "head_count" if stem.endswith(".attn_q") else "head_count_kv"
    heads = file.metadata.get(
        f"{architecture}.attention.{key}", file.metadata.get(f"{architecture}.attention.head_count")
    )
    rows = record.shape[0]
    if not isinstance(heads, int) or heads <= 0 or rows % (2 * heads):
        raise ConfigError(f'{file.path}: tensor "{record.name}" of {rows} rows does not divide into {heads!r} heads')
    # Stored as (head, pair, half); wanted as (head, half, pair).
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def dequantize(rows: torch.Tensor, storage: str) -> torch.Tensor:
    """Stored bytes, uint8 [rows, bytes of a row], as fp32 [rows, elements of a row] (F16, BF16: in their own dtype)."""
    if storage in PLAIN_DTYPES:
        return rows.contiguous().view(PLAIN_DTYPES[storage])
    if storage in OWN_FORMATS:
        blocks = rows.view(rows.shape[0], -1, BLOCKS[storage][1])
        return OWN_FORMATS[storage](blocks).view(rows.shape[0], -1)
    kind = gguf.GGMLQuantizationType[storage]
    return torch.from_numpy(gguf.dequantize(rows.numpy(), kind))


def block_scales(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """The fp16 at byte `begin` of each block, uint8 [..., bytes of a block], as fp32 [..., 1]."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16).float()


def block_nibbles(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """The 32 four-bit numbers of each block, uint8 [..., 32]: low halves of the 16 bytes first, then high halves."""
    packed = blocks[..., begin : begin + 16]
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return block_nibbles(blocks, 2).float().sub_(8.0).mul_(block_scales(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return block_nibbles(blocks, 4).float().mul_(block_scales(blocks, 0)).add_(block_scales(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[..., 2:34].contiguous().view(torch.int8).float().mul_(block_scales(blocks, 0))


# The rarer ones come from the gguf library.
OWN_FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
