"""How many KV blocks fit: a pure decision from a budget, and the one reading of the machine's free memory."""

from typing import NamedTuple

import psutil
import torch

GIB = 2**30
CPU_SHARE = 0.5  # of available memory: other processes live here too
DEVICE_SHARE = 0.92  # of free memory: what is left is for the allocator's fragments


class Budget(NamedTuple):
    """The decision and the sentence that explains it."""

    num_blocks: int
    text: str


def free_bytes(device: torch.device) -> int:
    """Memory that the KV cache may take by default, after weights and a warm-up step."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available * CPU_SHARE)
    return int(torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE)


def choose_blocks(
    block_bytes: int, block_tokens: int, free: int, max_rows: int, max_len: int, wanted: int = 0, memory_gib: float = 0
) -> Budget:
    """`wanted` blocks if given, else what `memory_gib` or `free` bytes hold, at most what all rows at full length use.

    Raises MemoryError when not even one sequence of `max_len` tokens fits.
    """
    row_blocks = -(-max_len // block_tokens)
    limit = int(memory_gib * GIB) if memory_gib else free
    num_blocks = wanted or min(limit // block_bytes, max_rows * row_blocks)
    source = "as configured" if wanted else f"{limit / GIB:.2f} GiB {'configured' if memory_gib else 'free for KV'}"
    text = (
        f"{num_blocks} KV blocks of {block_tokens} tokens, {num_blocks * block_bytes / GIB:.2f} GiB ({source}): "
        f"{num_blocks * block_tokens} tokens, {num_blocks / row_blocks:.1f} sequences of {max_len}"
    )
    if num_blocks < row_blocks:
        raise MemoryError(f"{text}; one sequence of {max_len} tokens needs {row_blocks} blocks: lower model.max_len")
    return Budget(num_blocks, text)
