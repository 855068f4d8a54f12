"""Pairs of tokens and experts sorted by expert on the device, in blocks of one expert each.

A pair p = t * K + k is token t's k-th expert. `plan`, int32: [0] the number of row blocks; [16 + b] the expert of block
b; from `ids_start` on, BLOCK_M pairs per block, with the number of all pairs where there is none: those of a block
follow one another from its start. Few pairs, one launch: each expert's program counts them all. Many, two: programs of
CHUNK pairs count theirs, then each finds its pairs' places from all counts. No atomics, so nothing varies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import options, release, wait

TABLE_START = tl.constexpr(16)
FEW_PAIRS = 2048  # in one launch
FEW_COUNTS = FEW_PAIRS * 128  # as well: each expert's program counts all pairs
CHUNK = 512
STEP = 8192  # counts, of all chunks and experts


@triton.jit(do_not_specialize=["num_pairs", "ids_start"])
def sort_pairs(  # type: ignore[no-untyped-def]
    experts_ptr,
    plan_ptr,
    num_pairs,
    ids_start,
    EXPERTS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """experts int32 [T * K], at most CHUNK pairs; plan int32. Grid (E): a program places those of its own expert."""
    mine = tl.program_id(0)
    bins = tl.arange(0, EXPERTS_PAD)
    pair = tl.arange(0, CHUNK)
    wait(PDL)
    release(PDL)
    expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=0)
    counts = tl.histogram(expert, EXPERTS_PAD)
    counts -= tl.where(bins == 0, CHUNK - num_pairs, 0)  # those beyond the last pair
    blocks = tl.cdiv(counts, BLOCK_M)
    first = tl.sum(tl.where(bins < mine, blocks, 0), axis=0)
    num_mine = tl.sum(tl.where(bins == mine, blocks, 0), axis=0)
    if mine == 0:
        tl.store(plan_ptr, tl.sum(blocks, axis=0))
    for begin in range(0, num_mine, 32):
        block = begin + tl.arange(0, 32)
        tl.store(plan_ptr + TABLE_START + first + block, mine, mask=block < num_mine)
    ids_ptr = plan_ptr + ids_start + first * BLOCK_M
    hit = (expert == mine) & (pair < num_pairs)
    order = tl.cumsum(hit.to(tl.int32), axis=0)
    tl.store(ids_ptr + order - 1, pair, mask=hit)
    rest = tl.sum(hit.to(tl.int32), axis=0) + tl.arange(0, BLOCK_PAD)
    tl.store(ids_ptr + rest, num_pairs, mask=rest < num_mine * BLOCK_M)


@triton.jit(do_not_specialize=["num_pairs", "ids_start", "num_ids"])
def count_pairs(  # type: ignore[no-untyped-def]
    experts_ptr,
    counts_ptr,
    plan_ptr,
    num_pairs,
    ids_start,
    num_ids,
    EXPERTS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """counts int32 [C, EXPERTS_PAD] of each chunk's pairs; plan's ids: no pair anywhere. Grid (C)."""
    chunk = tl.program_id(0)
    bins = tl.arange(0, EXPERTS_PAD)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    wait(PDL)
    release(PDL)
    counts = tl.histogram(tl.load(experts_ptr + pair, mask=pair < num_pairs, other=0), EXPERTS_PAD)
    beyond = tl.maximum((chunk + 1) * CHUNK - num_pairs, 0)
    tl.store(counts_ptr + chunk * EXPERTS_PAD + bins, counts - tl.where(bins == 0, beyond, 0))
    for begin in range(chunk * CHUNK, num_ids, tl.num_programs(0) * CHUNK):
        place = begin + tl.arange(0, CHUNK)
        tl.store(plan_ptr + ids_start + place, num_pairs, mask=place < num_ids)


@triton.jit(do_not_specialize=["num_pairs", "ids_start"])
def place_pairs(  # type: ignore[no-untyped-def]
    experts_ptr,
    counts_ptr,
    plan_ptr,
    num_pairs,
    ids_start,
    EXPERTS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each pair to its place; program 0 writes the blocks' experts. Grid (C)."""
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    bins = tl.arange(0, EXPERTS_PAD)
    wait(PDL)
    release(PDL)
    within = tl.arange(0, CHUNK)
    pair = chunk * CHUNK + within
    # those beyond the last pair come last, as if of one more expert
    expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=EXPERTS_PAD)
    ordered = tl.sort(expert * CHUNK + within)
    expert = ordered // CHUNK
    own = tl.load(counts_ptr + chunk * EXPERTS_PAD + bins)
    total = tl.zeros([STEP, EXPERTS_PAD], tl.int32)
    before = tl.zeros([STEP, EXPERTS_PAD], tl.int32)
    for begin in range(0, chunks, STEP):
        row = begin + tl.arange(0, STEP)
        counts = tl.load(counts_ptr + row[:, None] * EXPERTS_PAD + bins[None, :], mask=(row < chunks)[:, None], other=0)
        total += counts
        before += tl.where((row < chunk)[:, None], counts, 0)
    blocks = tl.cdiv(tl.sum(total, axis=0), BLOCK_M)
    first = tl.cumsum(blocks, axis=0) - blocks
    # of an expert's first pair in the chunk: its place less its index in `ordered`
    start = first * BLOCK_M + tl.sum(before, axis=0) - (tl.cumsum(own, axis=0) - own)
    real = expert < EXPERTS_PAD
    place = tl.gather(start, tl.where(real, expert, 0), axis=0) + within
    tl.store(plan_ptr + ids_start + place, chunk * CHUNK + ordered % CHUNK, mask=real)
    if chunk == 0:
        tl.store(plan_ptr, tl.sum(blocks, axis=0))
        for block in range(tl.max(blocks, axis=0)):
            tl.store(plan_ptr + TABLE_START + first + block, bins, mask=block < blocks)


class Sorted:
    """Pairs by expert, on the device: `plan` as above, and the bound of its row blocks."""

    __slots__ = ("ids_start", "max_blocks", "num_pairs", "plan")

    def __init__(self, experts: Tensor, num_experts: int, block_m: int) -> None:
        self.num_pairs = pairs = experts.numel()
        self.max_blocks = (pairs + min(num_experts, pairs) * (block_m - 1)) // block_m
        self.ids_start = TABLE_START.value + (self.max_blocks + 15) // 16 * 16
        num_ids, device = self.max_blocks * block_m, experts.device
        self.plan = torch.empty(self.ids_start + num_ids, dtype=torch.int32, device=device)
        bins, launch = triton.next_power_of_2(num_experts), options(device)
        if pairs <= FEW_PAIRS and pairs * num_experts <= FEW_COUNTS:
            sort_pairs[(num_experts,)](
                experts,
                self.plan,
                pairs,
                self.ids_start,
                EXPERTS_PAD=bins,
                BLOCK_M=block_m,
                BLOCK_PAD=triton.next_power_of_2(block_m),
                CHUNK=1024 if pairs <= 1024 else FEW_PAIRS,
                num_warps=4 if pairs <= 1024 else 8,
                **launch,
            )
            return
        chunks = triton.cdiv(pairs, CHUNK)
        counts = torch.empty(chunks, bins, dtype=torch.int32, device=device)
        count_pairs[(chunks,)](
            experts, counts, self.plan, pairs, self.ids_start, num_ids, bins, CHUNK, num_warps=4, **launch
        )
        place_pairs[(chunks,)](
            experts, counts, self.plan, pairs, self.ids_start, bins, block_m, CHUNK, STEP // bins,
            num_warps=8, **launch,
        )  # fmt: skip
