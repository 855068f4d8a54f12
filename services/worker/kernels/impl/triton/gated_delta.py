"""The gated delta rule: kernels for rows with one token, or with drafts besides; prompts go through _delta_chunks.py.

Each keeps a part of a head's state [D, some of E] in registers, read and written once a step. Of few rows a program of
the decode kernel holds all of E and ends with the gated norm of its value head; else that is a launch of its own.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._delta_chunks import delta_by_chunks, softplus
from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.impl.triton.gated_rms_norm import norm_into
from services.worker.kernels.ops.gated_delta import L2_EPS, GatedNorm, Past, gated_delta
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Impl

EPS = tl.constexpr(L2_EPS)
DECODE_VALUES = 32  # of E in one program
NORMED_VALUES = 128  # the same, where the norm needs all of them
NORMED_ROWS = 4  # up to here a launch less is worth more than many small programs
SMALL_POINTERS = ["starts_ptr", "contexts_ptr", "blocks_ptr"]  # a step's, which may lie anywhere
DRAFT_POINTERS = ["offsets_ptr", "slots_ptr", "held_ptr"]


@triton.jit
def _advance(state, k, v, strength, forgetting, decay, bias):  # type: ignore[no-untyped-def]
    """The state [D, E part] behind a token whose key [D] has length 1."""
    beta = 1.0 / (1.0 + tl.exp(-strength))
    state *= tl.exp(-decay * softplus(forgetting + bias))
    correction = (v - tl.sum(state * k[:, None], 0)) * beta
    return state + k[:, None] * correction[None, :]


@triton.jit(do_not_specialize_on_alignment=SMALL_POINTERS)
def delta_decode_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    gates_ptr,
    decay_ptr,
    bias_ptr,
    state_ptr,
    starts_ptr,
    contexts_ptr,
    blocks_ptr,
    out_ptr,
    norm_gate_ptr,
    norm_ptr,
    eps,
    gates_stride,
    norm_stride,
    GATES_HEAD: tl.constexpr,
    NORM_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs: parts of E, value heads, rows. qkv: [T, HEADS, 2D + SHARE * E]; gates: [T, HEADS, 2 * SHARE];
    state: float32 [blocks, HEADS * SHARE, D, E]; out: [T, HEADS * SHARE, E]. norm: [E] or None; its gate: [T, HEADS,
    SHARE * E] in strides (norm_stride, NORM_HEAD, 1).
    """
    release(PDL)
    row = tl.program_id(2)
    head = tl.program_id(1)
    key_head, place = head // SHARE, head % SHARE
    keys = tl.arange(0, BLOCK_D)
    values = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    key_mask, value_mask = keys < D, values < E
    mask = key_mask[:, None] & value_mask[None, :]
    decay = tl.load(decay_ptr + head)
    bias = tl.load(bias_ptr + head)
    # the step's numbers and the state are older than the step: read while the kernel ahead still runs
    token = tl.load(starts_ptr + row).to(tl.int64)
    has_state = tl.load(contexts_ptr + row) > 1
    block = tl.load(blocks_ptr + row).to(tl.int64)
    state_ptr += ((block * HEADS * SHARE + head) * D + keys[:, None]) * E + values[None, :]
    state = tl.load(state_ptr, mask=mask & has_state, other=0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + values, mask=value_mask, other=0.0)
    wait(PDL)
    qkv_ptr += (token * HEADS + key_head) * (2 * D + SHARE * E)
    gates_ptr += token * gates_stride + key_head * GATES_HEAD + place
    q = tl.load(qkv_ptr + keys, mask=key_mask, other=0.0).to(tl.float32)
    k = tl.load(qkv_ptr + D + keys, mask=key_mask, other=0.0).to(tl.float32)
    v = tl.load(qkv_ptr + 2 * D + place * E + values, mask=value_mask, other=0.0).to(tl.float32)
    strength = tl.load(gates_ptr).to(tl.float32)
    forgetting = tl.load(gates_ptr + SHARE).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * (D**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    if norm_ptr is not None:
        norm_gate_ptr += token * norm_stride + key_head * NORM_HEAD + place * E
        gate = tl.load(norm_gate_ptr + values, mask=value_mask, other=0.0).to(tl.float32)
    state = _advance(state, k, v, strength, forgetting, decay, bias)
    result = tl.sum(state * q[:, None], 0)
    tl.store(state_ptr, state, mask=mask)
    if norm_ptr is not None:
        # rounded before the weight and before the gate, as in the op's meaning
        result *= tl.rsqrt(tl.sum(result * result, 0) / E + eps)
        result = (result.to(norm.dtype) * norm).to(tl.float32) * (gate * tl.sigmoid(gate))
    tl.store(
        out_ptr + (token * HEADS * SHARE + head) * E + values, result.to(out_ptr.dtype.element_ty), mask=value_mask
    )


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=[*SMALL_POINTERS, *DRAFT_POINTERS])
def delta_drafts_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    gates_ptr,
    decay_ptr,
    bias_ptr,
    state_ptr,
    past_ptr,
    past_gates_ptr,
    starts_ptr,
    contexts_ptr,
    blocks_ptr,
    offsets_ptr,
    slots_ptr,
    held_ptr,
    out_ptr,
    num_rows,
    gates_stride,
    GATES_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PLACES: tl.constexpr,
    ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As delta_decode_kernel, where entries of a row's drafts may follow its own; the first of them does all.

    past: [blocks, PLACES, HEADS, D + SHARE * E]; past_gates: [blocks, PLACES, HEADS, 2 * SHARE]. What held of the last
    drafts is behind the state: it goes through it first. The state that stays is that behind the first entry's token.
    """
    release(PDL)
    row = tl.program_id(2)
    head = tl.program_id(1)
    key_head, place = head // SHARE, head % SHARE
    keys = tl.arange(0, BLOCK_D)
    values = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    key_mask, value_mask = keys < D, values < E
    mask = key_mask[:, None] & value_mask[None, :]
    decay = tl.load(decay_ptr + head)
    bias = tl.load(bias_ptr + head)
    wait(PDL)
    if tl.load(offsets_ptr + row) > 0:
        return
    entries = tl.arange(0, ENTRIES)
    others = tl.load(offsets_ptr + row + entries, mask=row + entries < num_rows, other=-1)
    drafts = tl.sum(((others == entries) & (entries > 0)).to(tl.int32), 0)
    held = tl.load(held_ptr + tl.load(slots_ptr + row))
    token = tl.load(starts_ptr + row).to(tl.int64)
    position = tl.load(contexts_ptr + row) - 1
    block = tl.load(blocks_ptr + row).to(tl.int64)
    state_ptr += ((block * HEADS * SHARE + head) * D + keys[:, None]) * E + values[None, :]
    state = tl.load(state_ptr, mask=mask & (position > 0), other=0.0)
    for at in range(-held, drafts + 1):
        is_past, is_draft = at < 0, at > 0
        kept = (block * PLACES + (position + at) % PLACES) * HEADS + key_head
        past = past_ptr + kept * (D + SHARE * E)
        past_gates = past_gates_ptr + kept * (2 * SHARE) + place
        line = qkv_ptr + ((token + at) * HEADS + key_head) * (2 * D + SHARE * E)
        gates = gates_ptr + (token + at) * gates_stride + key_head * GATES_HEAD + place
        q = tl.load(line + keys, mask=key_mask & (at >= 0), other=0.0).to(tl.float32)
        k = tl.load(line + D + keys, mask=key_mask & (at >= 0), other=0.0)
        v = tl.load(line + 2 * D + place * E + values, mask=value_mask & (at >= 0), other=0.0)
        strength = tl.load(gates, mask=at >= 0, other=0.0)
        forgetting = tl.load(gates + SHARE, mask=at >= 0, other=0.0)
        # other programs write the same key, nobody reads it in this step
        tl.store(past + keys, k, mask=key_mask & is_draft)
        tl.store(past + D + place * E + values, v, mask=value_mask & is_draft)
        tl.store(past_gates, strength, mask=is_draft)
        tl.store(past_gates + SHARE, forgetting, mask=is_draft)
        k = tl.where(is_past, tl.load(past + keys, mask=key_mask & is_past, other=0.0), k).to(tl.float32)
        v = tl.where(is_past, tl.load(past + D + place * E + values, mask=value_mask & is_past, other=0.0), v)
        strength = tl.where(is_past, tl.load(past_gates, mask=is_past, other=0.0), strength)
        forgetting = tl.where(is_past, tl.load(past_gates + SHARE, mask=is_past, other=0.0), forgetting)
        q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * (D**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
        gated = strength.to(tl.float32), forgetting.to(tl.float32)
        state = _advance(state, k, v.to(tl.float32), gated[0], gated[1], decay, bias)
        result = tl.sum(state * q[:, None], 0)
        out = out_ptr + ((token + at) * HEADS * SHARE + head) * E + values
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=value_mask & (at >= 0))
        tl.store(state_ptr, state, mask=mask & (at == 0))


@cache
def _sizes(heads: int, share: int, key_dim: int, value_dim: int, normed: bool) -> dict[str, int]:
    return {
        "HEADS": heads,
        "SHARE": share,
        "D": key_dim,
        "E": value_dim,
        "BLOCK_D": max(triton.next_power_of_2(key_dim), 16),
        "BLOCK_E": max(min(triton.next_power_of_2(value_dim), NORMED_VALUES if normed else DECODE_VALUES), 16),
    }


def gated_delta_by_state(
    qkv: Tensor,
    gates: Tensor,
    decay: Tensor,
    bias: Tensor,
    state: Tensor,
    blocks: Tensor,
    rows: AttentionRows,
    past: Past | None = None,
    norm: GatedNorm | None = None,
) -> Tensor:
    _, value_heads, key_dim, value_dim = state.shape
    num_tokens, heads, _ = qkv.shape
    out = torch.empty((num_tokens, value_heads, value_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return out
    shape = heads, value_heads // heads, key_dim, value_dim
    step = rows.query_starts, rows.context_lens, blocks
    strides = {"gates_stride": gates.stride(0), "GATES_HEAD": gates.stride(1)}
    drafts = rows.drafts if past is not None else None
    done = 0  # tokens that are normed
    if decode := rows.num_decode:
        fused = norm is not None and drafts is None and value_dim <= NORMED_VALUES and decode <= NORMED_ROWS
        sizes = _sizes(*shape, fused)
        grid = triton.cdiv(value_dim, sizes["BLOCK_E"]), value_heads, decode
        if past is None or drafts is None:
            gate, weight, eps = norm if norm is not None and fused else (qkv, None, 0.0)
            delta_decode_kernel[grid](
                qkv, gates, decay, bias, state, *step, out, gate, weight, eps, norm_stride=gate.stride(0),
                NORM_HEAD=gate.stride(1), **strides, num_warps=8 if fused else 4, **sizes, **options(qkv.device),
            )  # fmt: skip
            done = decode if fused else 0
        else:
            delta_drafts_kernel[grid](
                qkv, gates, decay, bias, state, *past, *step, *drafts, out, len(blocks), **strides,
                num_warps=4, **sizes, **_places(past.gates.shape[1]), **options(qkv.device),
            )  # fmt: skip
    if decode < len(blocks):
        delta_by_chunks(qkv, gates, decay, bias, state, blocks, rows, out)
    if norm is not None and done < num_tokens:
        norm_into(out[done:], out[done:], norm.gate[done:], norm.weight, norm.eps)
    return out


def _places(places: int) -> dict[str, int]:
    return {"PLACES": places, "ENTRIES": triton.next_power_of_2(places // 2 + 1)}


IMPL = Impl(gated_delta, "triton", gated_delta_by_state, needs_gpu)


def _aot(name: str, places: int = 0, normed: bool = False) -> AotCase:
    signature: dict[str, Constant] = dict.fromkeys(SMALL_POINTERS, "*i32")
    signature["blocks_ptr"] = "*i64"
    signature |= dict.fromkeys(("qkv_ptr", "gates_ptr", "out_ptr"), "*bf16:16")
    signature |= dict.fromkeys(("decay_ptr", "bias_ptr", "state_ptr"), "*fp32:16")
    signature |= {"gates_stride": "i32:16", "GATES_HEAD": 4, "PDL": False}
    signature |= _sizes(16, 2, 128, 128, normed)
    if places:
        signature |= dict.fromkeys(("past_ptr", "past_gates_ptr"), "*bf16:16")
        signature |= {**dict.fromkeys(DRAFT_POINTERS, "*i32"), "num_rows": "i32", **_places(places)}
        return AotCase(name, delta_drafts_kernel, signature, num_warps=4)
    signature |= {"norm_gate_ptr": "*bf16:16", "norm_ptr": "*bf16:16" if normed else None, "eps": "fp32"}
    signature |= {"norm_stride": "i32:16", "NORM_HEAD": 768}
    return AotCase(name, delta_decode_kernel, signature, num_warps=8 if normed else 4)


AOT = (
    _aot("decode_16x2x128x128"),
    _aot("normed_16x2x128x128", normed=True),
    _aot("drafts_16x2x128x128", 7),
)
