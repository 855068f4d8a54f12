"""Eight-bit weights (GGUF's Q8_0, Q6_K, Q5) as two planes of four bits, multiplied by the four-bit kernel of int4.py.

A number n in [-128, 127] is 16 * h + l with h in [-8, 7] and l in [0, 15], both four bits wide; so W @ x is
[H | L] @ [x; x] with 16 times the scale for H. torch has no eight-bit kernel with a scale per group; this one reads
half of bf16's bytes and keeps the stored numbers.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.kernels.packing.mx import grouped
from services.worker.quant.contract import StoredTensor, Weight
from services.worker.quant.int4 import GROUP, MIDDLE, ROW_MULTIPLE, Groups, Int4Format, Int4Weight

BLOCK_BYTES = 2 + GROUP
EXACT_8 = "Q8_0"
RECODED_8 = ("Q6_K", "Q5_K", "Q5_0", "Q5_1")  # of fewer bits, and groups or offsets that the kernels do not have


class Int8Weight:
    """`planes`: [out_features, 2 * in_features], the high halves of the numbers, then the low ones."""

    format_name = "int8"
    fused = None

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> None:
        self._planes = Int4Weight(numbers, scales, offsets)
        self.out_features = self._planes.out_features
        self.in_features = self._planes.in_features // 2
        self.num_bytes = self._planes.num_bytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        narrow = x.to(torch.bfloat16)
        y = self._planes.linear(torch.cat((narrow, narrow), dim=-1)).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.dequantize())

    def dequantize(self) -> torch.Tensor:
        high, low = self._planes.dequantize().chunk(2, dim=-1)
        return high + low


class Int8Format:
    name = "int8"

    def unavailable(self) -> str | None:
        return Int4Format().unavailable()

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        for part in parts:
            if part.storage not in (EXACT_8, *RECODED_8):
                return f"{part.name} is stored as {part.storage}, not in eight bits"
        rows = sum(part.shape[0] for part in parts)
        return f"{rows} rows, not a multiple of {ROW_MULTIPLE}" if rows % ROW_MULTIPLE else None

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        planes = [in_planes(*eight_bits(part)) for part in parts]
        numbers, scales, offsets = (torch.cat(column) for column in zip(*planes, strict=True))
        return Int8Weight(numbers, scales, offsets)


def eight_bits(part: StoredTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [rows, in] and scales fp32 [rows, in / 32]; weight = number * scale.

    Q8_0 as it is stored (blocks of 34 bytes: fp16 d, 32 signed numbers). Others are rounded once more, by at most half
    of a 127th of the largest number of 32, where their own steps are at least four times as wide.
    """
    if part.storage != EXACT_8:
        numbers, scales = quantized(grouped(part.dense(torch.float32), GROUP), torch.int8)
        return numbers.flatten(1), scales.squeeze(-1)
    rows = part.blocks()
    blocks = rows.view(rows.shape[0], -1, BLOCK_BYTES)
    scales = blocks[..., :2].contiguous().view(torch.float16).float().squeeze(-1)
    return blocks[..., 2:].flatten(1).view(torch.int8), scales


def in_planes(numbers: torch.Tensor, scales: torch.Tensor) -> Groups:
    """Both planes, [rows, 2 * in]."""
    # number + 128 as an unsigned byte: its high half is h + 8, as the kernel wants it.
    shifted = numbers.view(torch.uint8) ^ 128
    planes = torch.cat((shifted >> 4, shifted & 15), dim=1)
    # The kernel takes MIDDLE from every four-bit number: right for h, given back for l by the offset.
    offsets = torch.cat((torch.zeros_like(scales), MIDDLE * scales), dim=1)
    return planes, torch.cat((16 * scales, scales), dim=1), offsets
