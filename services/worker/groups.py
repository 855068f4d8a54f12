"""Which layers share a block table and which a pool of blocks, from what each layer keeps. Pure; called at start.

A group is layers that keep the same tokens: all of them, those of one window, or a state. Groups of pages whose layers
are alike share a pool, so that memory goes where it is needed (ADR 0027): a page then has places for as many layers as
wastes least, and a kind with more layers is cut into several groups, the last of which may leave places empty.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.protocol import KvGroup
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.models.caches import LayerCache, PagedKv, RecurrentState

SCALE_BYTES = 4  # of a key's or value's own scale
MOST_GROUPS = 8  # of pages: each costs the host a table, in every step
TYPICAL_TOKENS = 8192  # of a sequence, to weigh empty places of one kind against those of another
LEAST_EVERY, MOST_EVERY = 256, 8192  # tokens from checkpoint to checkpoint


class GroupStep(NamedTuple):
    """One group's part of a step's inputs, for its layers: `attend(projected, rotation, cache, slots, rows)`."""

    slots: Tensor  # int64 [T]: where a token's key and value go, block * B + offset. Of a state: int64 [R], live blocks
    rows: AttentionRows  # with this group's tables; for a state only which tokens are whose, and how long contexts are


class Storage(NamedTuple):
    """Dtypes of what is kept: of pages, and of what a state keeps in that of activations."""

    pages: torch.dtype
    activations: torch.dtype
    scales_each: bool = False  # pages have a scale for each token and head besides (KvScale.each)


class Layout(NamedTuple):
    groups: tuple[KvGroup, ...]
    layers: tuple[tuple[int, int], ...]  # each layer's group, and its place in a block
    pools: tuple[tuple[LayerCache, ...], ...]  # what each place of a pool's blocks holds

    @property
    def is_plain(self) -> bool:
        """One group that keeps everything, which needs no words."""
        return len(self.groups) == 1 and self.groups[0].kind == "full"

    @property
    def pages(self) -> list[int]:
        """Groups of pages."""
        return [number for number, group in enumerate(self.groups) if group.kind != "state"]

    def block_bytes(self, block_tokens: int, storage: Storage) -> tuple[int, ...]:
        """Of each pool."""
        return tuple(sum(bytes_of(kept, block_tokens, storage) for kept in places) for places in self.pools)


def bytes_of(kept: LayerCache, block_tokens: int, storage: Storage) -> int:
    """One layer's part of a block."""
    if isinstance(kept, PagedKv):
        numbers = (kept.key_dim + kept.value_dim) * storage.pages.itemsize
        return block_tokens * kept.heads * (numbers + (2 * SCALE_BYTES if storage.scales_each else 0))
    return sum(math.prod(each.shape) * (each.dtype or storage.activations).itemsize for each in kept.tensors)


def plain(kept: Sequence[LayerCache]) -> Layout:
    """All layers in one group that keeps everything."""
    return Layout((KvGroup("full"),), tuple((0, layer) for layer in range(len(kept))), (tuple(kept),))


def lay_out(kept: Sequence[LayerCache], block_tokens: int, storage: Storage, every: int = 0) -> Layout:
    """`kept`: by layer. `every`: tokens from checkpoint to checkpoint of a state, 0: as bytes suggest.

    Raises ValueError if no layer has pages.
    """
    kinds: dict[int, list[int]] = {}  # layers by window
    for layer, each in enumerate(kept):
        if isinstance(each, PagedKv):
            kinds.setdefault(each.window, []).append(layer)
    if not kinds:
        raise ValueError("no layer keeps keys and values; a model of recurrent layers alone is not supported")
    pages = {(each.heads, each.key_dim, each.value_dim) for each in kept if isinstance(each, PagedKv)}
    width = places(kinds) if len(pages) == 1 else 0
    groups: list[KvGroup] = []
    pools: list[tuple[LayerCache, ...]] = [(kept[next(iter(kinds.values()))[0]],) * width] if width else []
    found: dict[int, tuple[int, int]] = {}
    for window, layers in sorted(kinds.items()):
        size = width or len(layers)
        if not width:
            pools.append(tuple(kept[layer] for layer in layers))
        for start in range(0, len(layers), size):
            found |= {layer: (len(groups), place) for place, layer in enumerate(layers[start : start + size])}
            groups.append(KvGroup("window" if window else "full", len(pools) - 1, window))
    states = [layer for layer, each in enumerate(kept) if isinstance(each, RecurrentState)]
    if states:
        found |= {layer: (len(groups), place) for place, layer in enumerate(states)}
        pools.append(tuple(kept[layer] for layer in states))
        found_every = every or checkpoint_tokens(kept, block_tokens, storage)
        groups.append(KvGroup("state", len(pools) - 1, every=-(-found_every // block_tokens) * block_tokens))
    return Layout(tuple(groups), tuple(found[layer] for layer in range(len(kept))), tuple(pools))


def places(kinds: dict[int, list[int]]) -> int:
    """Layers of a page that kinds of layers share: what leaves least empty in a typical sequence, then few groups."""

    def empty(width: int) -> tuple[int, int]:
        lost = sum(
            (-len(layers) % width) * min(window or TYPICAL_TOKENS, TYPICAL_TOKENS) for window, layers in kinds.items()
        )
        return lost, -width

    widths = range(1, max(map(len, kinds.values())) + 1)
    few = [width for width in widths if sum(-(-len(layers) // width) for layers in kinds.values()) <= MOST_GROUPS]
    return min(few or [max(widths)], key=empty)


def checkpoint_tokens(kept: Sequence[LayerCache], block_tokens: int, storage: Storage) -> int:
    """As many tokens as leave about as many bytes in pages as a state has: a power of two."""
    sizes = [(isinstance(each, RecurrentState), bytes_of(each, block_tokens, storage)) for each in kept]
    state = sum(size for is_state, size in sizes if is_state)
    pages = sum(size for is_state, size in sizes if not is_state)
    tokens = LEAST_EVERY
    while tokens < min(state * block_tokens / pages, MOST_EVERY):
        tokens *= 2
    return tokens
