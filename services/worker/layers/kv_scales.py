"""Scales of an 8-bit KV cache: what the checkpoint says of a layer, 1, or one for each token and head.

Called where a cache is made. The latter are tables that are written along with the cache, and so are part of it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.kernels.ops.kv_write import KvScale

SCALE_BYTES = 4
Zeros = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]


class KvScales(NamedTuple):
    """`each`: for every token and head; else `layers`: k and v of a layer by its number, 1 where there are none."""

    each: bool = False
    layers: Mapping[int, tuple[float, float]] = {}

    def block_bytes(self, shape: Sequence[int]) -> int:
        """shape: of a cache of one block, as KvCache.shape gives it."""
        return math.prod(shape[:-1]) * SCALE_BYTES if self.each else 0

    def make(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, zeros: Zeros) -> list[KvScale]:
        """Each layer's. shape: of the cache; dtype: what it holds; none where that is wide."""
        if dtype.itemsize != 1:
            return []
        if self.each:
            return [KvScale(table[0], table[1]) for table in zeros(tuple(shape[:-1]), torch.float32, device)]
        # gfx942's form of 8 bits means half as much by the same bits
        factor = 2.0 if dtype == torch.float8_e4m3fnuz and self.layers else 1.0

        def one(value: float) -> Tensor:
            # an allocation of its own: kernels are compiled for addresses that are multiples of 16
            return torch.full((1,), value * factor, device=device)

        both = [self.layers.get(layer, (1.0, 1.0)) for layer in range(shape[0])]
        return [KvScale(one(k), one(v)) for k, v in both]
