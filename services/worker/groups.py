"""Which layers share a block table and which a pool of blocks, from what each layer keeps. Pure; called at start.

A group is layers that keep the same tokens: all of them, those of one window, or a state. Groups whose blocks can be
made equally large share a pool, so that memory goes where it is needed (ADR 0027): a page then has places for as many
layers as the smallest of these groups has, and a larger group is cut into several, with some places empty.
"""

from typing import NamedTuple

from torch import Tensor

from services.worker.kernels.ops.paged_attention import AttentionRows


class GroupStep(NamedTuple):
    """One group's part of a step's inputs, for its layers: `attend(projected, rotation, cache, slots, rows)`."""

    slots: (
        Tensor  # int64 [T]: where each token's key and value go, block * B + offset. A state's: int64 [R], live blocks
    )
    rows: AttentionRows  # with this group's tables; for a state only which tokens are whose, and how long contexts are
