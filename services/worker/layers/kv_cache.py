"""The paged KV cache of all layers of one kind. Owner: the runner's step; kernels write it, `copy_blocks` too."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.models.spec import DecoderSpec


class KvCache:
    """One allocation, [layers, 2, num_blocks, block_tokens, KV heads, head size]; index 1 is keys, then values.

    Zero at first: masked positions of a read block must hold finite numbers.
    """

    def __init__(self, storage: Tensor) -> None:
        """`storage` is all zeros, of the shape that `shape` gives."""
        self.storage = storage
        self.layers = [(layer[0], layer[1]) for layer in storage]

    @staticmethod
    def shape(spec: DecoderSpec, num_blocks: int, block_tokens: int) -> tuple[int, ...]:
        return spec.num_layers, 2, num_blocks, block_tokens, spec.num_kv_heads, spec.head_dim

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[2]

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Block target[i] becomes a copy of block source[i], in all layers; all are read before one is written."""
        device = self.storage.device
        read = torch.tensor(source, dtype=torch.int64, device=device)
        written = torch.tensor(target, dtype=torch.int64, device=device)
        # 8-bit floats have no indexed copy of their own
        storage = self.storage.view(torch.uint8) if self.storage.element_size() == 1 else self.storage
        storage.index_copy_(2, written, storage.index_select(2, read))
