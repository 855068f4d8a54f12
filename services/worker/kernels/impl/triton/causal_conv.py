"""One program takes some channels of one row, all of its tokens one tile after the other, and the state with them."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.ops.causal_conv import causal_conv
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Impl

TOKENS = 32  # of a tile, of rows with more than one
CHANNELS = 64
DECODE_CHANNELS = 256
SMALL_POINTERS = [
    "starts_ptr",
    "contexts_ptr",
    "blocks_ptr",
    "offsets_ptr",
    "slots_ptr",
    "held_ptr",
]  # a step's, which may lie anywhere


@triton.jit(do_not_specialize=["first_row", "num_rows"], do_not_specialize_on_alignment=SMALL_POINTERS)
def causal_conv_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    state_ptr,
    starts_ptr,
    contexts_ptr,
    blocks_ptr,
    offsets_ptr,
    slots_ptr,
    held_ptr,
    out_ptr,
    first_row,
    num_rows,
    stride_t,
    STRIDE_H: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    HELD: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    AHEAD: tl.constexpr,
    ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: [T, WIDTH / GROUP, GROUP] in strides (stride_t, STRIDE_H, 1); weight: [WIDTH, TAPS]; out: [T, WIDTH].

    state: [blocks, TAPS - 1 + AHEAD, WIDTH]. HELD: a power of two, at least what is written of that. Program 1 has the
    channels, 0 the row. ENTRIES: 0, or a power of two above AHEAD where rows may have drafts: the first entry does all.
    """
    release(PDL)
    row = first_row + tl.program_id(0)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < WIDTH
    # the step's numbers are older than the step: read while the kernel ahead still runs
    begin = tl.load(starts_ptr + row)
    end = tl.load(starts_ptr + row + 1)
    has_state = tl.load(contexts_ptr + row) > end - begin
    block = tl.load(blocks_ptr + row).to(tl.int64)
    wait(PDL)
    offset = 0
    if ENTRIES:
        offset = tl.load(offsets_ptr + row)
    if (begin == end) | (offset > 0):
        return
    sure = end  # behind the tokens whose inputs the state has for certain
    shift = TAPS - 1 - begin
    if ENTRIES:
        entries = tl.arange(0, ENTRIES)
        others = tl.load(offsets_ptr + row + entries, mask=row + entries < num_rows, other=-1)
        end += tl.sum(((others == entries) & (entries > 0)).to(tl.int32), 0)
        shift += tl.load(held_ptr + tl.load(slots_ptr + row))
    state_ptr += block * ((TAPS - 1 + AHEAD) * WIDTH)
    x_ptr += channels // GROUP * STRIDE_H + channels % GROUP
    for first in range(begin, end, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        sums = tl.zeros((TOKENS, CHANNELS), tl.float32)
        for back in tl.static_range(TAPS):
            source = tokens - back
            weight = tl.load(weight_ptr + channels * TAPS + (TAPS - 1 - back), mask=inside, other=0.0)
            mask = ((source >= begin) & (tokens < end))[:, None] & inside[None, :]
            value = tl.load(x_ptr[None, :] + source.to(tl.int64)[:, None] * stride_t, mask=mask, other=0.0)
            sums += value.to(tl.float32) * weight.to(tl.float32)[None, :]
            if back > 0:
                # what lies before the row's tokens, which only the first tile reaches
                place = shift + source
                mask = ((source < begin) & (tokens < end) & has_state)[:, None] & inside[None, :]
                held = tl.load(state_ptr + place[:, None] * WIDTH + channels[None, :], mask=mask, other=0.0)
                sums += held.to(tl.float32) * weight.to(tl.float32)[None, :]
        places = tokens.to(tl.int64)[:, None] * WIDTH + channels[None, :]
        result = sums / (1.0 + tl.exp(-sums))
        tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), mask=(tokens < end)[:, None] & inside[None, :])
    # the last inputs become the state; of a short row some of them are in it already
    slots = tl.arange(0, HELD)
    source = sure - (TAPS - 1) + slots
    wanted = (source < end)[:, None] & inside[None, :]
    kept = tl.load(
        x_ptr[None, :] + source.to(tl.int64)[:, None] * stride_t, mask=wanted & (source >= begin)[:, None], other=0.0
    )
    earlier = tl.load(
        state_ptr + (shift + source)[:, None] * WIDTH + channels[None, :],
        mask=wanted & ((source < begin) & has_state)[:, None],
        other=0.0,
    )
    kept = tl.where((source >= begin)[:, None], kept, earlier)
    # other lanes of this program may not have read yet
    tl.debug_barrier()
    tl.store(state_ptr + slots[:, None] * WIDTH + channels[None, :], kept, mask=wanted)


@cache
def _sizes(heads: int, group: int, taps: int, is_decode: bool, ahead: int = 0, drafts: bool = False) -> dict[str, int]:
    width = heads * group
    most = DECODE_CHANNELS if is_decode else CHANNELS
    return {
        "GROUP": group,
        "WIDTH": width,
        "TAPS": taps,
        "HELD": triton.next_power_of_2(taps - 1 + (ahead if drafts else 0)),
        "AHEAD": ahead,
        "ENTRIES": triton.next_power_of_2(ahead + 1) if drafts else 0,
        "TOKENS": 1 if is_decode else TOKENS,
        "CHANNELS": min(most, triton.next_power_of_2(width)),
    }


def causal_conv_by_rows(x: Tensor, weight: Tensor, state: Tensor, blocks: Tensor, rows: AttentionRows) -> Tensor:
    num_tokens, heads, group = x.shape
    out = torch.empty((num_tokens, heads, group), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    decode, num_rows, taps = rows.num_decode, len(blocks), weight.shape[1]
    ahead = state.shape[1] - taps + 1
    entries = rows.drafts or (blocks, blocks, blocks)
    for first, count in ((0, decode), (decode, num_rows - decode)):
        if count:
            drafts = first < decode and rows.drafts is not None
            sizes = _sizes(heads, group, taps, first < decode, ahead, drafts)
            causal_conv_kernel[(count, triton.cdiv(sizes["WIDTH"], sizes["CHANNELS"]))](
                x, weight, state, rows.query_starts, rows.context_lens, blocks, *entries, out, first, num_rows,
                x.stride(0),
                STRIDE_H=x.stride(1), num_warps=2 if first < decode else 4, **sizes, **options(x.device),
            )  # fmt: skip
    return out


IMPL = Impl(causal_conv, "triton", causal_conv_by_rows, needs_gpu)


def _aot(name: str, is_decode: bool, ahead: int = 0) -> AotCase:
    signature: dict[str, Constant] = dict.fromkeys(SMALL_POINTERS, "*i32")
    signature["blocks_ptr"] = "*i64"
    signature |= dict.fromkeys(("x_ptr", "weight_ptr", "state_ptr", "out_ptr"), "*bf16:16")
    signature |= {"first_row": "i32", "num_rows": "i32", "stride_t": "i32:16", "STRIDE_H": 768, "PDL": False}
    signature |= _sizes(16, 512, 4, is_decode, ahead, ahead > 0)
    return AotCase(name, causal_conv_kernel, signature, num_warps=2 if is_decode else 4, hot=is_decode)


AOT = (_aot("decode_16x512", True), _aot("chunks_16x512", False), _aot("drafts_16x512", True, 3))
