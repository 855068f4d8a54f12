"""How many KV blocks fit: pure decisions from plain numbers, and the readings of the machine's memory.

On a CPU a share of what is free, on a GPU what the largest step leaves of `kv.gpu_memory_utilization`. Sizes are bytes.
"""

import math
from typing import NamedTuple

import numpy as np
import psutil
import torch

from common.errors import ConfigError

GIB = 2**30
CPU_SHARE, CPU_MOST = 0.5, 4 * GIB  # of available memory: other processes live here too
GRAPH_BYTES = 8 * 2**20  # of one captured graph, besides the tensors that all graphs share
ADVICE = (
    "raise kv.gpu_memory_utilization or kv.memory_gib, or lower model.max_len, scheduler.step_tokens or "
    "scheduler.max_rows"
)


class Shape(NamedTuple):
    """What the configuration and the model together allow."""

    max_rows: int
    max_len: int  # tokens of one sequence
    block_tokens: int


class Limits(NamedTuple):
    """The first that is not 0 counts: a number of blocks, a size, the memory that is free."""

    blocks: int
    memory_gib: float
    free_bytes: int  # may be less than 0
    most_bytes: int = 0  # what not even a configured size may exceed; 0: unknown


class Budget(NamedTuple):
    """The decision, and the sentence that explains it to people."""

    num_blocks: int
    text: str


class Readings(NamedTuple):
    """A GPU's memory, after the largest steps have run."""

    total: int
    others: int  # not torch's: the driver's context, code, libraries, other processes
    weights: int  # everything that lives as long as the model
    activations: int  # the most that steps needed besides
    graphs: int  # what captured graphs will need, measured or bounded

    @property
    def left(self) -> int:
        """Of the whole GPU."""
        return self.total - self.others - self.weights - self.activations - self.graphs


def for_cache(readings: Readings, utilization: float) -> int:
    """What the KV cache may take when everything together takes this share of the GPU. May be less than 0."""
    return readings.left - int(readings.total * (1 - utilization))


def table(readings: Readings, cache_bytes: int) -> str:
    """One line for people."""
    rows = [
        ("weights", readings.weights),
        ("activations", readings.activations),
        ("graphs", readings.graphs),
        ("KV cache", cache_bytes),
        ("others", readings.others),
        ("free", readings.left - cache_bytes),
    ]
    return f"GPU memory {readings.total / GIB:.2f} GiB: " + ", ".join(f"{n} {b / GIB:.2f}" for n, b in rows)


def cpu_free_bytes() -> int:
    """Memory that the KV cache of a CPU may take by default, when the weights are there."""
    return min(int(psutil.virtual_memory().available * CPU_SHARE), CPU_MOST)


class Meter:
    """Torch's and the driver's figures of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def restart(self) -> int:
        """Gives unused memory back and forgets the peak; returns what torch still holds."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """The most that torch has held since `restart`, what lay unused between tensors included."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)

    def total_and_others(self) -> tuple[int, int]:
        """The GPU's memory, and what of it is in use but not torch's."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total, max(total - free - torch.cuda.memory_reserved(self._device), 0)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that on a CPU take memory page by page as they are written (torch.zeros would write them all at start)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def choose_blocks(block_bytes: int, shape: Shape, limits: Limits, spare: int = 0) -> Budget:
    """As many blocks as the limits allow, at most what all rows at full length can use; `spare` more are not counted.

    Raises ConfigError when not even one sequence of full length fits, or what is configured is not there.
    """
    row_blocks = -(-shape.max_len // shape.block_tokens)
    size = int(limits.memory_gib * GIB) or limits.free_bytes
    num_blocks = limits.blocks or min(size // block_bytes - spare, shape.max_rows * row_blocks)
    reason = "as configured" if limits.blocks else f"of {size / GIB:.2f} GiB {'set' if limits.memory_gib else 'free'}"
    text = (
        f"{num_blocks} KV blocks of {shape.block_tokens} tokens, {num_blocks * block_bytes / GIB:.2f} GiB ({reason}): "
        f"{num_blocks * shape.block_tokens} tokens, {num_blocks / row_blocks:.1f} sequences of {shape.max_len}"
    )
    if num_blocks < row_blocks:
        missing = (row_blocks - num_blocks) * block_bytes / GIB
        short = f"one sequence needs {row_blocks} blocks, {missing:.2f} GiB are missing"
        raise ConfigError(f"{max(num_blocks, 0)} KV blocks fit ({reason}); {short}: {ADVICE}")
    if limits.most_bytes and (missing_bytes := (num_blocks + spare) * block_bytes - limits.most_bytes) > 0:
        raise ConfigError(
            f"{text}; {missing_bytes / GIB:.2f} GiB more than the GPU has left: lower kv.blocks or kv.memory_gib"
        )
    return Budget(num_blocks, text)
