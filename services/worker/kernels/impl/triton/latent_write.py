"""A program takes some heads of one token's queries, or its latent and key: rotation, norm, and the page's row."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.impl.triton._rotary import held, limit_of, load_turned
from services.worker.kernels.ops.latent_write import LatentNorm, latent_write
from services.worker.kernels.registry import Impl

HEADS = 16  # of a program; one wave turns them, so that all is read before anything is written over it


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def latent_write_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, NUM_HEADS, PLAIN + 2 * HALF]
    kv_ptr,  # [T, LATENT + 2 * HALF]
    cos_ptr,
    sin_ptr,
    norm_ptr,  # [LATENT]
    pages_ptr,  # [slots, ROW]
    slots_ptr,  # int64 [T]
    eps,
    q_stride,
    kv_stride,
    COS_STRIDE: tl.constexpr,
    SIN_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    HALF: tl.constexpr,
    LATENT: tl.constexpr,
    ROW: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T, 1 + blocks of HEADS heads); the first program of a token has its latent."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, offsets = tl.arange(0, LATENT_PADDED), tl.arange(0, HALF_PADDED)
    weight = tl.load(norm_ptr + dims, mask=dims < LATENT, other=0.0).to(tl.float32)
    release(PDL)
    wait(PDL)
    cos_ptr += token * COS_STRIDE
    sin_ptr += token * SIN_STRIDE
    if part == 0:
        kv_ptr += token * kv_stride
        latent = tl.load(kv_ptr + dims, mask=dims < LATENT, other=0.0).to(tl.float32)
        alone = tl.zeros([1, 1], tl.int32)
        k_low, k_high = load_turned(
            kv_ptr + LATENT, cos_ptr, sin_ptr, alone, alone == 0, HALF, HALF_PADDED, INTERLEAVED
        )
        latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps)
        pages_ptr += tl.load(slots_ptr + token).to(tl.int64) * ROW
        kind = kv_ptr.dtype.element_ty  # what is stored is rounded to it first, in 8 bits too
        latent = (latent.to(kind).to(tl.float32) * weight).to(kind)
        tl.store(pages_ptr + dims, held(latent, pages_ptr, LIMIT), mask=dims < LATENT)
        place = pages_ptr + LATENT + alone + offsets[None, :]
        tl.store(place, held(k_low.to(kind), pages_ptr, LIMIT), mask=(offsets < HALF)[None, :])
        tl.store(place + HALF, held(k_high.to(kind), pages_ptr, LIMIT), mask=(offsets < HALF)[None, :])
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)
        rows = (head * (PLAIN + 2 * HALF) + PLAIN)[:, None]
        own = (head < NUM_HEADS)[:, None]
        q_ptr += token * q_stride
        low, high = load_turned(q_ptr, cos_ptr, sin_ptr, rows, own, HALF, HALF_PADDED, INTERLEAVED)
        mask = own & (offsets < HALF)[None, :]
        tl.store(q_ptr + rows + offsets[None, :], low.to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(q_ptr + rows + HALF + offsets[None, :], high.to(q_ptr.dtype.element_ty), mask=mask)


def _sizes(num_heads: int, plain: int, rotated: int, latent: int, row: int) -> dict[str, int]:
    return {
        "NUM_HEADS": num_heads,
        "PLAIN": plain,
        "HALF": rotated // 2,
        "LATENT": latent,
        "ROW": row,
        "HEADS": min(HEADS, int(triton.next_power_of_2(num_heads))),
        "HALF_PADDED": int(triton.next_power_of_2(rotated // 2)),
        "LATENT_PADDED": int(triton.next_power_of_2(latent)),
    }


def run(
    q: Tensor,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: LatentNorm,
    pages: Tensor,
    slots: Tensor,
    interleaved: bool,
) -> None:
    num_tokens, num_heads, width = q.shape
    if not num_tokens:
        return
    rotated = cos.shape[-1]
    sizes = _sizes(num_heads, width - rotated, rotated, norm.weight.shape[0], pages.shape[2])
    latent_write_kernel[(num_tokens, 1 + triton.cdiv(num_heads, sizes["HEADS"]))](
        q,
        kv,
        cos,
        sin,
        norm.weight,
        pages,
        slots,
        norm.eps,
        q.stride(0),
        kv.stride(0),
        COS_STRIDE=cos.stride(0),
        SIN_STRIDE=sin.stride(0),
        INTERLEAVED=interleaved,
        LIMIT=limit_of(pages),
        num_warps=1,
        **sizes,
        **options(q.device),
    )


IMPL = Impl(latent_write, "triton", run, needs_gpu)


def _aot(name: str, num_heads: int, interleaved: bool, fp8: bool = False) -> AotCase:
    signature: dict[str, Constant] = dict.fromkeys(
        ("q_ptr", "kv_ptr", "cos_ptr", "sin_ptr", "norm_ptr", "pages_ptr"), "*bf16:16"
    )
    sizes: dict[str, Any] = _sizes(num_heads, 128, 64, 512, 576)
    signature |= {"slots_ptr": "*i64", "eps": "fp32", "q_stride": "i32:16", "kv_stride": "i32:16"}
    signature |= {**sizes, "COS_STRIDE": 128, "SIN_STRIDE": 128, "INTERLEAVED": interleaved, "PDL": False}
    signature |= {"LIMIT": 448.0, "pages_ptr": "*fp8e4nv:16"} if fp8 else {"LIMIT": 0.0}
    return AotCase(name, latent_write_kernel, signature, num_warps=1)


AOT = (
    _aot("deepseek_v3", 128, True),
    _aot("deepseek_v2_lite", 16, True),
    _aot("halves", 64, False),
    _aot("deepseek_v3_fp8", 128, True, True),
)
