"""In how many parts the attention of prompts reads the context, and in which tiles: pure, from host numbers only.

Where programs are too few for the device and the context is long, parts of it go to programs of their own.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from services.worker.kernels.impl.triton._launch import processors

MAX_SPLITS = 16
MIN_SPLIT = 1024  # keys per part; shorter parts cost more in joining than they win
JOIN_KEYS = 45  # keys that a program reads while a MiB of a part's sums is stored and joined, measured on an H200


class Tile(NamedTuple):
    """How one program is shaped. `max_registers` (per thread, NVIDIA): 0 leaves it to the compiler."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = 0


def default_tile(itemsize: int, head_dim: int, small_lds: bool) -> Tile:
    """`small_lds`: at most 64 KiB of shared memory (gfx942); there the queries stay in registers."""
    if itemsize > 2:
        return Tile(32, 32, 4, 1)
    if head_dim > 128:
        return Tile(64, 32, 4, 1) if small_lds else Tile(128, 32, 8, 3)
    return Tile(128, 64, 4, 2) if small_lds else Tile(128, 64, 8, 3)


def count_blocks(num_tokens: int, num_rows: int, block_q: int) -> int:
    """An upper bound of the query blocks, however the tokens are spread over the rows."""
    return (num_tokens - 1) // block_q + num_rows


def expected_blocks(num_tokens: int, num_rows: int, block_q: int) -> int:
    """Query blocks of rows whose last ones are half full."""
    return -(-num_tokens // block_q) + (num_rows - 1) // 2


def choose_splits(programs: int, span: int, part_bytes: int, device: torch.device) -> int:
    """How many parts the context is read in: the count that ends first, if all programs read `span` keys.

    part_bytes: of the sums of one part.
    """
    return _choose_splits(programs, span, part_bytes, processors(device))


@lru_cache(4096)
def _choose_splits(programs: int, span: int, part_bytes: int, units: int) -> int:
    most = min(MAX_SPLITS, span // MIN_SPLIT)
    if most < 2 or programs >= 4 * units:
        return 1

    def cost(splits: int) -> int:
        """In keys: a program starts and stores in the time of 128, the launch that joins takes that of 512."""
        joining = 512 + splits * part_bytes * JOIN_KEYS // 2**20 if splits > 1 else 0
        return -(-programs * splits // units) * (-(-span // splits) + 128) + joining

    return min(range(1, most + 1), key=cost)
