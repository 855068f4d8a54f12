"""What layers keep of the tokens before, in pools of blocks. Owner: the runner's step; kernels write it, copies too."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.errors import ConfigError
from services.worker import memory
from services.worker.groups import Layout, Storage
from services.worker.kernels import layout as layouts
from services.worker.kernels.ops.kv_write import KvScale
from services.worker.layers.kv_scales import UNSCALED, KvScales
from services.worker.models.caches import LayerCache, PagedKv, RecurrentState
from services.worker.models.spec import DecoderSpec

FP8_SINCE = 89  # NVIDIA's compute capability


def storage_dtype(wanted: str, activation: torch.dtype, arch: str) -> torch.dtype:
    """What a cache holds under `kv.dtype`: "auto" means activations, else 8 bits. Raises ConfigError."""
    if wanted == "auto":
        return activation
    if arch.startswith("sm_") and int(arch.removeprefix("sm_")) < FP8_SINCE:
        raise ConfigError(f'kv.dtype is "{wanted}", which GPUs older than sm_{FP8_SINCE} cannot do; this one is {arch}')
    return torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn


class LayerKv(NamedTuple):
    """One layer's pages, in the layout that its ops are bound to."""

    keys: Tensor  # [num_blocks, block_tokens, KV heads, head size], or another layout's shape
    values: Tensor
    scale: KvScale | None  # of 8-bit storage, and only of it; of latents its k, None: 1


Parts = list[tuple[Tensor, int]]
LayerState = tuple[Tensor, ...]  # one layer's recurrent state, each [num_blocks, ...], as RecurrentState declares


class KvCache:
    """One pool for as many layers as `storage` has, all in one group that keeps everything.

    One allocation, [layers, 2, num_blocks, block_tokens, KV heads, head size]; index 1 is keys, then values. Zero at
    first: masked positions of a read block must hold finite numbers. A layer's part of a block is one run of memory in
    every layout, so that only `layers` knows which it is. Of latent attention [layers, 1, num_blocks, block_tokens, 1,
    LatentSpec.row]: keys, and values of 0 numbers.
    """

    def __init__(self, storage: Tensor, scales: Sequence[KvScale] = (), layout: str = layouts.TOKENS) -> None:
        """`storage` is all zeros, of the shape that `shape` gives; `scales`: each layer's, for 8-bit storage only, and
        all zeros where they are each token's and head's own (KvScale.each).

        Without them 8-bit storage holds values as they are. `layout`: that of the ops which will use it.
        """
        self.groups: tuple[int, ...] = (0,) * len(storage)  # each layer's
        each: Sequence[KvScale | None] = scales or [unscaled(storage)] * len(storage)
        self.layers: list[Any] = [  # LayerKv or LayerState
            LayerKv(layer[0], layer[0, ..., :0], scale)
            if len(layer) == 1
            else LayerKv(*layouts.pages(layout, layer[0], layer[1]), scale)
            for layer, scale in zip(storage, each, strict=True)
        ]
        # of each pool: its tensors, and which of their dimensions is that of blocks
        self.pools: list[Parts] = [[(storage, 2), *((table, 0) for scale in scales if scale.each for table in scale)]]

    @staticmethod
    def shape(spec: DecoderSpec, num_blocks: int, block_tokens: int) -> tuple[int, ...]:
        if spec.latent is not None:
            return spec.num_layers, 1, num_blocks, block_tokens, 1, spec.latent.row
        return spec.num_layers, 2, num_blocks, block_tokens, spec.num_kv_heads, spec.head_dim

    @property
    def storage(self) -> Tensor:
        """The first pool's."""
        return self.pools[0][0][0]

    @property
    def num_blocks(self) -> int:
        """Of the first pool."""
        return self.blocks_of(0)

    def blocks_of(self, pool: int) -> int:
        tensor, dim = self.pools[pool][0]
        return tensor.shape[dim]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for parts in self.pools for tensor, _ in parts)

    def copy_blocks(self, source: Sequence[int], target: Sequence[int], pool: int = 0) -> None:
        """Block target[i] becomes a copy of block source[i], in all layers; all are read before one is written."""
        for tensor, dim in self.pools[pool]:
            read = torch.tensor(source, dtype=torch.int64, device=tensor.device)
            written = torch.tensor(target, dtype=torch.int64, device=tensor.device)
            # 8-bit floats have no indexed copy of their own
            content = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            content.index_copy_(dim, written, content.index_select(dim, read))


class GroupedCache(KvCache):
    """As a Layout says: `blocks` of each pool, and `pages` is the layout of pages that ops are bound to."""

    def __init__(
        self,
        layout: Layout,
        blocks: Sequence[int],
        block_tokens: int,
        storage: Storage,
        device: torch.device,
        pages: str = layouts.TOKENS,
        scales: KvScales = UNSCALED,
    ) -> None:
        """`scales`: of 8-bit pages, where storage has none for each token and head."""
        self.groups = tuple(group for group, _ in layout.layers)
        self.pools = []
        made = []
        for places, number in zip(layout.pools, blocks, strict=True):
            kept, parts = _allocate(places, number, block_tokens, storage, device, pages)
            made.append(kept)
            self.pools.append(parts)
        self.layers = [made[layout.groups[group].pool][place] for group, place in layout.layers]
        if storage.pages.itemsize == 1 and not storage.scales_each:
            for number, layer in enumerate(self.layers):
                if isinstance(layer, LayerKv) and (layer.values.shape[-1] or number in scales.layers):
                    self.layers[number] = layer._replace(scale=scales.of(number, storage.pages, device))


def unscaled(storage: Tensor) -> KvScale | None:
    """For 8-bit storage that holds values as they are."""
    if storage.element_size() != 1:
        return None
    # two allocations: kernels are compiled for addresses that are multiples of 16
    return KvScale(torch.ones(1, device=storage.device), torch.ones(1, device=storage.device))


def _allocate(
    places: Sequence[LayerCache], blocks: int, block_tokens: int, storage: Storage, device: torch.device, pages: str
) -> tuple[list[LayerKv | LayerState], Parts]:
    """A pool of zeros: what a layer at each place gets, and its tensors."""
    first = places[0]
    if isinstance(first, PagedKv) and first.key_dim == first.value_dim and set(places) == {first}:
        shape = len(places), 2, blocks, block_tokens, first.heads, first.key_dim
        together = memory.zeros(shape, storage.pages, device)
        tables = memory.zeros(shape[:-1], torch.float32, device) if storage.scales_each else None
        scales = (
            [unscaled(together)] * len(places) if tables is None else [KvScale(both[0], both[1]) for both in tables]
        )
        layers = [LayerKv(*layouts.pages(pages, *both), scale) for both, scale in zip(together, scales, strict=True)]
        return list(layers), [(together, 2)] if tables is None else [(together, 2), (tables, 2)]
    made: list[LayerKv | LayerState] = []
    parts: Parts = []
    for kept in places:
        if isinstance(kept, RecurrentState):
            state = tuple(
                memory.zeros((blocks, *each.shape), each.dtype or storage.activations, device) for each in kept.tensors
            )
            made.append(state)
            parts += [(tensor, 0) for tensor in state]
            continue
        keys = memory.zeros((blocks, block_tokens, kept.heads, kept.key_dim), storage.pages, device)
        parts.append((keys, 0))
        if not kept.value_dim:
            made.append(LayerKv(keys, keys[..., :0], None))  # of latent attention, whose ops know one layout
            continue
        values = memory.zeros((blocks, block_tokens, kept.heads, kept.value_dim), storage.pages, device)
        parts.append((values, 0))
        scale = unscaled(keys)
        if storage.scales_each:
            own = (memory.zeros((blocks, block_tokens, kept.heads), torch.float32, device) for _ in range(2))
            scale = KvScale(*own)
            parts += [(table, 0) for table in scale]
        made.append(LayerKv(*layouts.pages(pages, keys, values), scale))
    return made, parts
