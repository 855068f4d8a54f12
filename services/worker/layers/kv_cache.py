"""The paged KV cache of all layers of one kind. Owner: the runner's step; kernels write it, `copy_blocks` too."""

from collections.abc import Sequence

import torch
from torch import Tensor


class KvCache:
    """One allocation, [layers, 2, num_blocks, block_tokens, KV heads, head size]; index 1 is keys, then values.

    Zero at first: masked positions of a read block must hold finite numbers.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_tokens: int, heads: tuple[int, int], like: Tensor
    ) -> None:
        """`heads` is (KV heads, head size); dtype and device are those of `like`."""
        shape = (num_layers, 2, num_blocks, block_tokens, *heads)
        self.storage = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.layers = [(layer[0], layer[1]) for layer in self.storage]
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens

    @staticmethod
    def block_bytes(num_layers: int, block_tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> int:
        """Memory of one block over all layers."""
        return num_layers * 2 * block_tokens * heads[0] * heads[1] * dtype.itemsize

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Block target[i] becomes a copy of block source[i], in all layers; all are read before one is written."""
        device = self.storage.device
        read = torch.tensor(source, dtype=torch.int64, device=device)
        written = torch.tensor(target, dtype=torch.int64, device=device)
        self.storage.index_copy_(2, written, self.storage.index_select(2, read))
