"""Gated DeltaNet layers as a model file declares them: sizes, names of tensors, and what follows from these. Pure.

A projection's rows lie by key head: its query, its key, its value heads, then what gates these; so they are divided
among ranks by key heads. The convolution's lie by part in checkpoints, and by key head here (quant/by_head.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from services.worker.models.caches import RecurrentState, StateTensor


@dataclass(frozen=True)
class DeltaSpec:
    """Gated DeltaNet in place of attention, in `layers`. Each of `heads` keys has `values` value heads."""

    layers: tuple[int, ...]
    heads: int
    values: int
    key_dim: int
    value_dim: int
    taps: int  # of the convolution
    drafts: int = 0  # of a row in a step, at most

    @property
    def value_heads(self) -> int:
        return self.heads * self.values

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Channels of a key head's query, key and value heads, which go through the convolution."""
        return self.key_dim, self.key_dim, self.values * self.value_dim

    @property
    def width(self) -> int:
        """Numbers of a key head in the projection: those, and as many gates as values."""
        return sum(self.convolved) + self.values * self.value_dim

    @property
    def cache(self) -> RecurrentState:
        """The last inputs of the convolution, and a matrix per value head; of drafts, what these would be made from."""
        inputs = StateTensor((self.taps - 1 + self.drafts, self.heads * sum(self.convolved)))
        matrices = StateTensor((self.value_heads, self.key_dim, self.value_dim), torch.float32)
        if not self.drafts:
            return RecurrentState((inputs, matrices))
        places = 2 * self.drafts + 1  # those of the last step are read where those of this one are written
        past = StateTensor((places, self.heads, sum(self.convolved) - self.key_dim))
        return RecurrentState((inputs, matrices, past, StateTensor((places, self.heads, 2 * self.values))))

    def weights(self, hidden: int) -> int:
        """Elements of a layer's matrices."""
        return hidden * (self.heads * (self.width + 2 * self.values) + self.value_heads * self.value_dim)


@dataclass(frozen=True)
class DeltaNames:
    """Checkpoint names. `{i}` is the layer."""

    qkvz: str  # queries, keys, values, gates of the norm
    ba: str  # strength of a correction, and how much is forgotten
    conv: str
    decay: str  # its logarithm
    decay_bias: str
    norm: str
    out: str


def delta_shapes(spec: DeltaSpec, names: DeltaNames, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names, still with `{i}`, and shapes of a layer's tensors."""
    yield names.qkvz, (spec.heads * spec.width, hidden)
    yield names.ba, (2 * spec.value_heads, hidden)
    yield names.conv, (spec.heads * sum(spec.convolved), spec.taps)
    yield names.decay, (spec.value_heads,)
    yield names.decay_bias, (spec.value_heads,)
    yield names.norm, (spec.value_dim,)
    yield names.out, (hidden, spec.value_heads * spec.value_dim)
