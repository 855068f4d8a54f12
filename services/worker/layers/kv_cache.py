"""The paged KV cache of all layers of one kind. Owner: the runner's step; kernels write it, `copy_blocks` too."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import ConfigError
from services.worker.kernels import layout as layouts
from services.worker.kernels.ops.kv_write import KvScale
from services.worker.models.spec import DecoderSpec

FP8_SINCE = 89  # NVIDIA's compute capability


def storage_dtype(wanted: str, activation: torch.dtype, arch: str) -> torch.dtype:
    """What a cache holds under `kv.dtype` ("auto": activations, or "fp8"). `arch` as in Facts. Raises ConfigError."""
    if wanted == "auto":
        return activation
    if arch.startswith("sm_") and int(arch.removeprefix("sm_")) < FP8_SINCE:
        raise ConfigError(f'kv.dtype is "{wanted}", which GPUs older than sm_{FP8_SINCE} cannot do; this one is {arch}')
    return torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn


class LayerKv(NamedTuple):
    """One layer's part of the cache, in the layout that its ops are bound to."""

    keys: Tensor  # [num_blocks, block_tokens, KV heads, head size], or another layout's shape
    values: Tensor
    scale: KvScale | None  # of 8-bit storage, and only of it


class KvCache:
    """One allocation, [layers, 2, num_blocks, block_tokens, KV heads, head size]; index 1 is keys, then values.

    Of latent attention [layers, 1, num_blocks, block_tokens, 1, LatentSpec.row]: keys, and values of 0 numbers.

    Zero at first: masked positions of a read block must hold finite numbers. A block is one run of memory in every
    layout, so that only `layers` knows which it is.
    """

    def __init__(self, storage: Tensor, scales: Sequence[KvScale] = (), layout: str = layouts.TOKENS) -> None:
        """`storage` is all zeros, of the shape that `shape` gives; `scales`: each layer's, for 8-bit storage only.

        Without them 8-bit storage holds values as they are. `layout`: that of the ops which will use it.
        """
        self.storage = storage
        each: Sequence[KvScale | None] = scales or [None] * len(storage)
        if storage.element_size() == 1 and not scales:
            # two allocations: kernels are compiled for addresses that are multiples of 16
            ones = KvScale(torch.ones(1, device=storage.device), torch.ones(1, device=storage.device))
            each = [ones] * len(storage)
        if storage.shape[1] == 1:
            self.layers = [LayerKv(layer[0], layer[0, ..., :0], None) for layer in storage]
            return
        self.layers = [
            LayerKv(*layouts.pages(layout, layer[0], layer[1]), scale)
            for layer, scale in zip(storage, each, strict=True)
        ]

    @staticmethod
    def shape(spec: DecoderSpec, num_blocks: int, block_tokens: int) -> tuple[int, ...]:
        if spec.latent is not None:
            return spec.num_layers, 1, num_blocks, block_tokens, 1, spec.latent.row
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
