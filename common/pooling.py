"""Vectors of prompts: how hidden states become one, by request and by model. Pure; part of common/protocol.py.

Hidden states are those behind the model's final norm. A vector is float32: pooled, then cut, then brought to length 1.
"""

from typing import Literal

import msgspec

Mode = Literal["last", "mean"]  # the last token's hidden state, or the mean of all tokens'
MODES: tuple[Mode, ...] = ("last", "mean")


class Pooling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of a Report: what to make of the prompt's hidden states."""

    mode: Mode = "last"
    normalize: bool = True
    dimensions: int = 0  # the first ones only; 0: all


class Embedding(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of a model: what it was made for, where a request says nothing else."""

    size: int = 0  # of a hidden state; 0: no vectors, for the reason `lacks`
    mode: Mode = "last"
    normalize: bool = True
    lengths: tuple[int, ...] | None = None  # that vectors may be cut to; (): any; None: only `size`
    lacks: str = ""


def vector_bytes(pooling: Pooling, size: int) -> int:
    return 4 * (pooling.dimensions or size)
