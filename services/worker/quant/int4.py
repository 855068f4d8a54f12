"""Four-bit weights in groups of 32 with a scale and an offset each, multiplied as they are stored.

Takes GGUF's Q4_0, Q4_1 and Q4_K without re-quantizing: the four-bit numbers are kept, only scale and offset are rounded
to bf16. Reads a quarter of bf16's bytes, so it is the fastest form for a few rows; it computes in bf16 with fp32 sums.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from services.worker.quant.coded import NO_MARGINS, Coded
from services.worker.quant.contract import StoredTensor, Weight

GROUP = 32
MIDDLE = 8  # torch's kernel computes (number - 8) * scale + offset
ROW_MULTIPLE = 16  # rows that torch's layout needs to be divisible by

# Numbers uint8 [rows, in], scale and offset fp32 [rows, in / 32]: weight = (number - 8) * scale + offset.
Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Int4Weight:
    """`packed`: torch's layout of the numbers; `scales_offsets`: bf16 [in / 32, out, 2]."""

    format_name = "int4"
    fused = None

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> None:
        self.out_features, self.in_features = numbers.shape
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1)
        self._scales_offsets = torch.stack((scales.t(), offsets.t()), dim=-1).to(torch.bfloat16).contiguous()
        self.num_bytes = self._packed.numel() + self._scales_offsets.numel() * 2

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[0] == 0:
            return x.new_empty(0, self.out_features)
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.to(torch.bfloat16), self._packed, GROUP, self._scales_offsets
        ).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.dequantize())

    def dequantize(self) -> torch.Tensor:
        return self.linear(torch.eye(self.in_features)).t().contiguous()


class Int4Format:
    name = "int4"

    def unavailable(self) -> str | None:
        if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
            return "torch's four-bit kernel is slow on this CPU"
        return None

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        for part in parts:
            if not is_four_bits(part):
                return f"{part.name} is stored as {part.storage}, not in four bits"
            if part.shape[1] % GROUP:
                return f"{part.name} has rows of {part.shape[1]}"
        rows = sum(part.shape[0] for part in parts)
        return f"{rows} rows, not a multiple of {ROW_MULTIPLE}" if rows % ROW_MULTIPLE else None

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        groups = [four_bits(part) for part in parts]
        numbers, scales, offsets = (torch.cat(column) for column in zip(*groups, strict=True))
        return Int4Weight(numbers, scales, offsets)


def _halves(blocks: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    """`count` fp16 numbers from byte `begin` of each block, as fp32 [rows, blocks, count]."""
    return blocks[..., begin : begin + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] -> [..., 2n]: the low halves, then the high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def read_q4_0(rows: torch.Tensor) -> Groups:
    """Blocks of 18 bytes: fp16 d, 16 bytes of numbers; weight = (number - 8) * d."""
    blocks = rows.view(rows.shape[0], -1, 18)
    scales = _halves(blocks, 0, 1).squeeze(-1)
    return _nibbles(blocks[..., 2:]).flatten(1), scales, torch.zeros_like(scales)


def read_q4_1(rows: torch.Tensor) -> Groups:
    """Blocks of 20 bytes: fp16 d, fp16 m, 16 bytes of numbers; weight = number * d + m."""
    blocks = rows.view(rows.shape[0], -1, 20)
    scales, minima = _halves(blocks, 0, 2).unbind(-1)
    return _nibbles(blocks[..., 4:]).flatten(1), scales, minima + MIDDLE * scales


def read_q4_k(rows: torch.Tensor) -> Groups:
    """Blocks of 144 bytes for 8 groups: fp16 d and dmin, 12 bytes of six-bit scales and minima, 128 of numbers.

    weight = number * (d * scale) - dmin * minimum. Six-bit numbers: ggml's get_scale_min_k4 layout.
    """
    blocks = rows.view(rows.shape[0], -1, 144)
    d, dmin = _halves(blocks, 0, 2).split(1, dim=-1)  # type: ignore[no-untyped-call]
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), dim=-1).float() * d
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6) << 4), dim=-1).float() * dmin
    # 32 bytes hold two groups: one in the low halves, the next in the high halves.
    numbers = _nibbles(blocks[..., 16:].reshape(rows.shape[0], -1, 4, 32)).flatten(1)
    return numbers, scales.flatten(1), (MIDDLE * scales - minima).flatten(1)


READERS: dict[str, Callable[[torch.Tensor], Groups]] = {"Q4_0": read_q4_0, "Q4_1": read_q4_1, "Q4_K": read_q4_k}


def is_four_bits(part: StoredTensor) -> bool:
    """Whether it is in groups of 32 numbers, whoever has coded it."""
    if isinstance(part, Coded):
        return part.format.is_fours(part.scheme) and part.margins == NO_MARGINS and part.columns is None
    return part.storage in READERS


def four_bits(part: StoredTensor) -> Groups:
    return part.format.fours(part.read()) if isinstance(part, Coded) else READERS[part.storage](part.blocks())
