"""What one layer keeps of the tokens before: declared by model files in `DecoderSpec.caches`, laid out by groups.py.

Values only. Layers with equal declarations share a group, and so a block table.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedKv:
    """Of every token, keys [heads, key_dim] and values [heads, value_dim] in the cache's dtype.

    The layer gets pages of B tokens: keys [blocks, B, heads, key_dim], values [blocks, B, heads, value_dim]. MLA has
    one head of latent and rotated key, and values of 0 numbers, or an indexer's keys as values.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int = 0  # a token sees itself and so many less one before it, and older pages are freed; 0: all


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a recurrent state, without the dimension of blocks."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None  # None: that of activations


@dataclass(frozen=True)
class RecurrentState:
    """Of all tokens so far together, tensors of fixed shape: recurrent and convolution state.

    The layer gets a tuple of tensors [blocks, *shape], whose block `slots[r]` is row r's; it reads nothing there for a
    row that begins (its context is this step's tokens), and leaves there what the row's last token of the step leaves.
    """

    tensors: tuple[StateTensor, ...]


LayerCache = PagedKv | RecurrentState
