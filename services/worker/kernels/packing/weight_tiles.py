"""Weights in tiles that a matrix core reads in one piece, so that no wave waits for a strided row.

A matrix [N, K] becomes tiles of `rows` rows by 16 bytes (what a lane loads at once), tiles of the same rows one after
the other; the order is that of AITER's 16x16 weight shuffle, and of its 32x16. A tiled weight has the tiles' shape, so
that nothing can take one form for the other. Callers: weight formats at load, meanings of ops, providers (`as_matrix`).
"""

from torch import Tensor

ROWS = 16  # of a tile, unless a kernel wants 32
CHUNK_BYTES = 16
WIDTH = 32  # stored numbers (for packed formats bytes) that a row must be a multiple of


def fits_tiles(out_features: int, in_features: int, rows: int = ROWS) -> bool:
    return out_features % rows == 0 and in_features % WIDTH == 0


def tile_weight(weight: Tensor, rows: int = ROWS) -> Tensor:
    """[..., N, K] to [..., N / rows, K / x, rows, x] with x = 16 / itemsize; a new contiguous tensor.

    Raises ValueError where N is no multiple of `rows` or K none of 32.
    """
    *lead, out_features, inner = weight.shape
    if not fits_tiles(out_features, inner, rows):
        raise ValueError(
            f"a weight of {out_features} rows of {inner} does not divide into tiles: the rows must be a multiple of "
            f"{rows}, their length one of {WIDTH}"
        )
    chunk = CHUNK_BYTES // weight.element_size()
    split = weight.reshape(*lead, out_features // rows, rows, inner // chunk, chunk)
    return split.transpose(-3, -2).contiguous()


def untile_weight(tiles: Tensor) -> Tensor:
    """The matrices [..., N, K] that `tile_weight` was given; a new contiguous tensor."""
    return tiles.transpose(-3, -2).reshape(matrix_shape(tiles))


def matrix_shape(tiles: Tensor) -> tuple[int, ...]:
    *lead, blocks, columns, rows, chunk = tiles.shape
    return (*lead, blocks * rows, columns * chunk)


def as_matrix(tiles: Tensor) -> Tensor:
    """The tiles' memory under the matrices' shape [..., N, K], which is how AITER names it; no copy."""
    return tiles.view(matrix_shape(tiles))


def plain(weight: Tensor) -> Tensor:
    """The matrix [N, K], whether `weight` is one already or its tiles."""
    return weight if weight.dim() == 2 else untile_weight(weight)
