"""GGUF's four and eight bits as they are stored, multiplied in fp32 by the grouped_linear op.

Only for providers that have the op compiled: its torch meaning widens the whole matrix. Scales and offsets are kept in
fp16, which is exact for Q4_0, Q4_1 and Q8_0; Q4_K's six-bit products are rounded to it.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from services.worker.kernels.ops.grouped_linear import TILE, pack_tiles, unpack_tiles
from services.worker.quant.contract import StoredTensor, Weight
from services.worker.quant.int4 import MIDDLE, four_bits, is_four_bits
from services.worker.quant.int8 import EXACT_8, RECODED_8, eight_bits

Multiply = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]


class GroupedWeight:
    """`tiles`: of [out_features, in_features], in the op's layout."""

    fused = None

    def __init__(self, tiles: torch.Tensor, bits: int, out_features: int, multiply: Multiply) -> None:
        self.out_features, self.in_features = out_features, tiles.shape[1] * TILE
        self.format_name = f"grouped{bits}"
        self.num_bytes = tiles.numel()
        self._tiles, self._bits, self._multiply = tiles, bits, multiply

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self._multiply(x.float(), self._tiles, self._bits, self.out_features).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.dequantize())

    def dequantize(self) -> torch.Tensor:
        return unpack_tiles(self._tiles, self._bits)[: self.out_features]


class GroupedFormat:
    def __init__(self, bits: int, multiply: Multiply) -> None:
        self.name = f"grouped{bits}"
        self._bits, self._multiply = bits, multiply

    def unavailable(self) -> str | None:
        return None

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        for part in parts:
            if not (is_four_bits(part) if self._bits == 4 else part.storage in (EXACT_8, *RECODED_8)):
                return f"{part.name} is stored as {part.storage}, not in {self._bits} bits"
        return None

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        out_features = sum(part.shape[0] for part in parts)
        if self._bits == 8:
            eights = [eight_bits(part) for part in parts]
            numbers, scales = (torch.cat(column) for column in zip(*eights, strict=True))
            tiles = pack_tiles(numbers, scales, None)
            return GroupedWeight(tiles, 8, out_features, self._multiply)
        groups = [four_bits(part) for part in parts]
        numbers, scales, offsets = (torch.cat(column) for column in zip(*groups, strict=True))
        tiles = pack_tiles(numbers, scales, offsets - MIDDLE * scales)
        return GroupedWeight(tiles, 4, out_features, self._multiply)
