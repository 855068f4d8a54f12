"""Weights in tiles that a matrix core reads in one piece, so that no wave waits for a strided row.

A matrix [N, K] becomes tiles of `rows` rows by 32 bytes, each tile two halves of 16 bytes per row; the element order
is that of AITER's 16x16 (and 32x16, for int8) weight shuffle. A tiled weight has the tiles' shape, so nothing can take
one form for the other. Callers: weight formats at load, the meanings of ops, providers (`as_matrix`).
"""

import torch
from torch import Tensor

ROWS = 16  # of a tile, unless a kernel wants 32
CHUNK_BYTES = 16  # what a lane loads at once
CHUNKS = 2  # per row of a tile


def fits_tiles(out_features: int, row_bytes: int, rows: int = ROWS) -> bool:
    return out_features % rows == 0 and row_bytes % (CHUNK_BYTES * CHUNKS) == 0


def tile_weight(weight: Tensor, rows: int = ROWS) -> Tensor:
    """[..., N, K] to [..., N / rows, K / 2x, 2, rows, x] with x = 16 / itemsize; a new contiguous tensor.

    Raises ValueError where N is no multiple of `rows` or K no multiple of 2x.
    """
    *lead, out_features, inner = weight.shape
    if not fits_tiles(out_features, inner * weight.element_size(), rows):
        raise ValueError(
            f"a weight of {out_features} rows of {inner} {weight.dtype} does not divide into tiles of {rows} rows "
            f"by {CHUNK_BYTES * CHUNKS} bytes"
        )
    chunk = CHUNK_BYTES // weight.element_size()
    count = len(lead)
    split = weight.reshape(*lead, out_features // rows, rows, inner // (CHUNKS * chunk), CHUNKS, chunk)
    order = (*range(count), count, count + 2, count + 3, count + 1, count + 4)
    return split.permute(order).contiguous()


def untile_weight(tiles: Tensor) -> Tensor:
    """The matrices [..., N, K] that `tile_weight` was given; a new contiguous tensor."""
    *lead, blocks, columns, chunks, rows, chunk = tiles.shape
    count = len(lead)
    order = (*range(count), count, count + 3, count + 1, count + 2, count + 4)
    return tiles.permute(order).reshape(*lead, blocks * rows, columns * chunks * chunk)


def as_matrix(tiles: Tensor) -> Tensor:
    """The tiles' memory under the matrices' shape [..., N, K], which is how AITER names it; no copy."""
    *lead, blocks, columns, chunks, rows, chunk = tiles.shape
    return tiles.view(*lead, blocks * rows, columns * chunks * chunk)


def plain(weight: Tensor, dims: int) -> Tensor:
    """The matrix of `dims` dimensions, whether `weight` is one already or its tiles."""
    return weight if weight.dim() == dims else untile_weight(weight)


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
