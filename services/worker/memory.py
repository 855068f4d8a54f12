"""How many KV blocks fit: pure decisions from plain numbers, and the readings of the machine's memory.

On a CPU a share of what is free, on a GPU what the largest step leaves of `kv.gpu_memory_utilization`. Sizes are bytes.
"""

import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import psutil
import torch

from common.errors import ConfigError
from common.kv_needs import STATE_BLOCKS, needs, window_blocks
from services.worker.groups import TYPICAL_TOKENS, Layout

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
    pools: tuple[int, ...] = ()  # blocks of all pools, where there are more or rows have several tables


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
    """Zeros that on a CPU take memory page by page as they are written (torch.zeros would write them all at start).

    Small pages: numpy would ask for huge ones, for each of which the kernel may first move others away (40 to 100 ms
    within a step were seen).
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(dtype).view(shape)


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


def choose_pools(layout: Layout, block_bytes: Sequence[int], shape: Shape, limits: Limits, spare: int = 0) -> Budget:
    """`choose_blocks` for any layout; `block_bytes`: of each pool.

    The pools behind the first one get as many blocks as sequences of TYPICAL_TOKENS need when these fill the
    memory, but never more than all rows can use; the first one gets the rest. `kv.blocks` is its number.
    """
    if layout.is_plain:
        budget = choose_blocks(block_bytes[0], shape, limits, spare)
        return budget._replace(pools=(budget.num_blocks,))
    groups, count = layout.groups, len(layout.pools)
    least = needs(groups, count, shape.max_len, shape.block_tokens)
    usual = _usual(layout, min(shape.max_len, TYPICAL_TOKENS), shape.block_tokens)
    most = [blocks * shape.max_rows for blocks in _usual(layout, shape.max_len, shape.block_tokens)]
    size = int(limits.memory_gib * GIB) or limits.free_bytes
    sequences = size / sum(blocks * each for blocks, each in zip(usual, block_bytes, strict=True))
    if limits.blocks:
        sequences = limits.blocks / usual[0]
    pools = [
        max(min(int(sequences * blocks), limit), need) for blocks, limit, need in zip(usual, most, least, strict=True)
    ]
    others = sum((blocks + spare) * each for blocks, each in zip(pools[1:], block_bytes[1:], strict=True))
    pools[0] = limits.blocks or min((size - others) // block_bytes[0] - spare, most[0])
    total = sum((blocks + spare) * each for blocks, each in zip(pools, block_bytes, strict=True))
    reason = "as configured" if limits.blocks else f"of {size / GIB:.2f} GiB {'set' if limits.memory_gib else 'free'}"
    kinds = ", ".join(group.kind + (f" {group.window}" if group.window else "") for group in groups)
    whole = min(blocks / need for blocks, need in zip(pools, least, strict=True))
    text = (
        f"KV cache in groups ({kinds}): {' + '.join(map(str, pools))} blocks of {shape.block_tokens} tokens, "
        f"{total / GIB:.2f} GiB ({reason}): {whole:.1f} sequences of {shape.max_len}"
    )
    if pools[0] < least[0]:
        missing = (least[0] - pools[0]) * block_bytes[0] / GIB
        raise ConfigError(
            f"{max(pools[0], 0)} KV blocks fit ({reason}); one sequence needs {least[0]} blocks, "
            f"{missing:.2f} GiB are missing: {ADVICE}"
        )
    if limits.most_bytes and (missing_bytes := total - limits.most_bytes) > 0:
        raise ConfigError(
            f"{text}; {missing_bytes / GIB:.2f} GiB more than the GPU has left: lower kv.blocks or kv.memory_gib"
        )
    return Budget(pools[0], text, tuple(pools))


def _usual(layout: Layout, tokens: int, block_tokens: int) -> list[int]:
    """Blocks of each pool that a running sequence of so many tokens has, checkpoints included."""
    found = [0] * len(layout.pools)
    blocks = -(-tokens // block_tokens)
    for group in layout.groups:
        if group.kind == "state":
            found[group.pool] += STATE_BLOCKS + tokens // group.every
        elif group.kind == "window":
            found[group.pool] += min(blocks, window_blocks(group.window, 0, block_tokens))
        else:
            found[group.pool] += blocks
    return found
