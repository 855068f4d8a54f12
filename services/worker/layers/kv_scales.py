"""Scales of an 8-bit KV cache: what the checkpoint says of a layer, 1, or one for each token and head.

Called where a cache is made. The latter are tables that are written along with the cache, and so are part of it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from services.worker.kernels.ops.kv_write import KvScale


class KvScales(NamedTuple):
    """`each`: for every token and head; else `layers`: k and v of a layer by its number, 1 where there are none."""

    each: bool = False
    layers: Mapping[int, tuple[float, float]] = {}

    def of(self, layer: int, dtype: torch.dtype, device: torch.device) -> KvScale:
        """A layer's, of pages of `dtype`."""
        # gfx942's form of 8 bits means half as much by the same bits
        factor = 2.0 if dtype == torch.float8_e4m3fnuz and layer in self.layers else 1.0
        # an allocation each: kernels are compiled for addresses that are multiples of 16
        k, v = (torch.full((1,), value * factor, device=device) for value in self.layers.get(layer, (1.0, 1.0)))
        return KvScale(k, v)

    def make(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[KvScale]:
        """Each layer's, of a KvCache of that shape; none where it is wide."""
        if dtype.itemsize != 1:
            return []
        if self.each:
            tables = torch.zeros(tuple(shape[:-1]), dtype=torch.float32, device=device)
            return [KvScale(both[0], both[1]) for both in tables]
        return [self.of(layer, dtype, device) for layer in range(shape[0])]


UNSCALED = KvScales()
