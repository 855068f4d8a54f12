"""Launch geometry of the experts' kernels: which path and which tiles for how many tokens, from data or by rule."""

from bisect import bisect_left
from functools import cache
from typing import NamedTuple

import torch
import triton

from services.worker.kernels.impl.triton._launch import has_dependent_launch
from services.worker.kernels.tuned import table

FEW_TOKENS = 4  # without data: up to here pairs hardly share experts, and sorting costs more than it saves
FEW_PAIRS = 64
TUNED_BYTES = 2  # tables and large tiles are for elements of 16 bits


class Experts(NamedTuple):
    """What is known of a mixture at start."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int


class Few(NamedTuple):
    """The path without sorting: rows of the weights, columns and warps of a program, for both products.

    down_experts: of a step; 0: all of a token's.
    """

    up_rows: int
    up_chunk: int
    up_warps: int
    down_rows: int
    down_chunk: int
    down_warps: int
    down_experts: int = 0


class Tile(NamedTuple):
    """One grouped product: rows of the weights and columns per step, row blocks that go together, warps, stages.

    tail: blocks with no more pairs are products of so many (0: none is). wide: by the kernels of `_moe_wide`, 1 as
    they are, 2 with programs that stay and know no tail, which is for the second product.
    """

    rows: int
    block_k: int
    group_m: int
    warps: int
    stages: int
    tail: int = 0
    wide: int = 0


class Grouped(NamedTuple):
    """The path with sorting; block_m: pairs per tile, with wide tiles also the sum of two powers of two."""

    block_m: int
    up: Tile
    down: Tile


# What an H200 took most often for blocks of 128 rows, where rows begin at multiples of 16 bytes, as descriptors want.
DESCRIBED = Grouped(128, Tile(128, 64, 8, 8, 4, 64, 1), Tile(256, 64, 8, 8, 4, 64, 1))


class _Rows(NamedTuple):
    tokens: tuple[int, ...]
    plans: tuple[Few | Grouped, ...]


def choose(shape: Experts, num_tokens: int, device: torch.device, dtype: torch.dtype) -> Few | Grouped:
    """The plan for `num_tokens`: the row of the tuned table with the next larger number, else by rule."""
    rows = _tuned(shape, device)
    if rows.tokens and dtype.itemsize <= TUNED_BYTES:
        return rows.plans[min(bisect_left(rows.tokens, num_tokens), len(rows.plans) - 1)]
    pairs = num_tokens * shape.top_k
    if num_tokens <= FEW_TOKENS and pairs <= FEW_PAIRS:
        return default_few(shape)
    block_m = min(128, max(16, triton.next_power_of_2(triton.cdiv(pairs, shape.num_experts))))
    if dtype.itemsize > TUNED_BYTES:
        return wide_grouped(block_m)
    if block_m == 128 and shape.hidden % 8 == shape.inner % 8 == 0 and has_dependent_launch(device):
        return DESCRIBED
    return default_grouped(block_m, device)


@cache
def _tuned(shape: Experts, device: torch.device) -> _Rows:
    found: list[tuple[int, Few | Grouped]] = []
    for row in table("moe_gated", device):
        if (row["num_experts"], row["top_k"], row["hidden"], row["inner"]) != shape:
            continue
        if "few" in row:
            found.append((row["tokens"], Few(*row["few"])))
        else:
            found.append((row["tokens"], Grouped(row["block_m"], Tile(*row["up"]), Tile(*row["down"]))))
    found.sort()
    return _Rows(tuple(tokens for tokens, _ in found), tuple(plan for _, plan in found))


@cache
def default_few(shape: Experts) -> Few:
    """What an H200 took most often: stretches of 2 KiB, of two experts in a step where there are two."""
    up_chunk = min(1024, triton.next_power_of_2(shape.hidden))
    return Few(4, up_chunk, 4, 4, min(1024, triton.next_power_of_2(shape.inner)), 4, min(2, shape.top_k))


def default_grouped(block_m: int, device: torch.device) -> Grouped:
    return nvidia_grouped(block_m) if device.type == "cuda" and torch.version.hip is None else amd_grouped(block_m)


@cache
def nvidia_grouped(block_m: int) -> Grouped:
    if block_m <= 32:
        return Grouped(block_m, Tile(64, 64, 1, 4, 4), Tile(64, 128, 1, 4, 4))
    return Grouped(block_m, Tile(128, 64, 8, 8, 3), Tile(128, 64, 8, 8, 4))


@cache
def amd_grouped(block_m: int) -> Grouped:
    """gfx942 has 64 KiB of LDS."""
    return Grouped(block_m, Tile(64, 64, 8, 4, 2), Tile(64 if block_m <= 32 else 128, 64, 8, 4, 2))


@cache
def wide_grouped(block_m: int) -> Grouped:
    """For fp32, which serves comparison: small tiles fit everywhere."""
    return Grouped(min(block_m, 32), Tile(64, 32, 8, 4, 2), Tile(64, 32, 8, 4, 2))
