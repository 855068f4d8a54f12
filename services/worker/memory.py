"""How many KV blocks fit: a pure decision from a budget, and the one reading of the machine's free memory."""

import math
from typing import NamedTuple

import numpy as np
import psutil
import torch

from common.errors import ConfigError

GIB = 2**30
CPU_SHARE, CPU_MOST = 0.5, 4 * GIB  # of available memory: other processes live here too
DEVICE_SHARE = 0.92  # of free memory: what is left is for the allocator's fragments


class Shape(NamedTuple):
    """What the configuration and the model together allow."""

    max_rows: int
    max_len: int  # tokens of one sequence
    block_tokens: int


class Limits(NamedTuple):
    """The first that is not 0 counts: a number of blocks, a size, the memory that is free."""

    blocks: int
    memory_gib: float
    free_bytes: int


class Budget(NamedTuple):
    """The decision, and the sentence that explains it to people."""

    num_blocks: int
    text: str


def free_bytes(device: torch.device) -> int:
    """Memory that the KV cache may take by default, when the weights are there."""
    if device.type == "cpu":
        return min(int(psutil.virtual_memory().available * CPU_SHARE), CPU_MOST)
    return int(torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that on a CPU take memory page by page as they are written (torch.zeros would write them all at start)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def choose_blocks(block_bytes: int, shape: Shape, limits: Limits) -> Budget:
    """As many blocks as the limits allow, at most what all rows at full length can use.

    Raises ConfigError when not even one sequence of full length fits.
    """
    row_blocks = -(-shape.max_len // shape.block_tokens)
    size = int(limits.memory_gib * GIB) or limits.free_bytes
    num_blocks = limits.blocks or min(size // block_bytes, shape.max_rows * row_blocks)
    reason = "as configured" if limits.blocks else f"of {size / GIB:.2f} GiB {'set' if limits.memory_gib else 'free'}"
    text = (
        f"{num_blocks} KV blocks of {shape.block_tokens} tokens, {num_blocks * block_bytes / GIB:.2f} GiB ({reason}): "
        f"{num_blocks * shape.block_tokens} tokens, {num_blocks / row_blocks:.1f} sequences of {shape.max_len}"
    )
    if num_blocks < row_blocks:
        raise ConfigError(f"{text}; one sequence needs {row_blocks} blocks: lower model.max_len or raise the KV memory")
    return Budget(num_blocks, text)
