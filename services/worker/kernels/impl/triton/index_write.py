"""A program takes some heads of one token's index queries, or its index key: layer norm, rotation, the page's row."""

import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.impl.triton._rotary import held, limit_of, load_turned, rotate
from services.worker.kernels.ops.index_write import IndexNorm, index_write
from services.worker.kernels.registry import Impl

HEADS = 16  # of a program; one wave turns them, so that all is read before anything is written over it


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def index_write_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, NUM_HEADS, HEAD_DIM]
    k_ptr,  # [T, HEAD_DIM]
    cos_ptr,
    sin_ptr,
    weight_ptr,  # [HEAD_DIM]
    bias_ptr,
    pages_ptr,  # [slots, ROW]; the last HEAD_DIM numbers of a row
    slots_ptr,  # int64 [T]
    q_stride,
    k_stride,
    COS_STRIDE: tl.constexpr,
    SIN_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROW: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T, 1 + blocks of HEADS heads); the first program of a token has its key."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets, rest = tl.arange(0, HALF_PADDED), 2 * HALF + tl.arange(0, REST_PADDED)
    inside, others = offsets < HALF, rest < HEAD_DIM
    # a pair's numbers, side by side or half of the rotated ones apart
    low_at = offsets * 2 if INTERLEAVED else offsets
    high_at = low_at + 1 if INTERLEAVED else offsets + HALF
    release(PDL)
    wait(PDL)
    cos_ptr += token * COS_STRIDE
    sin_ptr += token * SIN_STRIDE
    if part == 0:
        k_ptr += token * k_stride
        k_low = tl.load(k_ptr + low_at, mask=inside, other=0.0).to(tl.float32)
        k_high = tl.load(k_ptr + high_at, mask=inside, other=0.0).to(tl.float32)
        k_rest = tl.load(k_ptr + rest, mask=others, other=0.0).to(tl.float32)
        mean = (tl.sum(k_low + k_high, 0) + tl.sum(k_rest, 0)) / HEAD_DIM
        k_low = tl.where(inside, k_low - mean, 0.0)
        k_high = tl.where(inside, k_high - mean, 0.0)
        k_rest = tl.where(others, k_rest - mean, 0.0)
        squares = tl.sum(k_low * k_low + k_high * k_high, 0) + tl.sum(k_rest * k_rest, 0)
        factor = tl.rsqrt(squares / HEAD_DIM + 1e-6)
        k_low = k_low * factor * tl.load(weight_ptr + low_at, mask=inside, other=0.0).to(tl.float32)
        k_high = k_high * factor * tl.load(weight_ptr + high_at, mask=inside, other=0.0).to(tl.float32)
        k_rest = k_rest * factor * tl.load(weight_ptr + rest, mask=others, other=0.0).to(tl.float32)
        k_low += tl.load(bias_ptr + low_at, mask=inside, other=0.0).to(tl.float32)
        k_high += tl.load(bias_ptr + high_at, mask=inside, other=0.0).to(tl.float32)
        k_rest += tl.load(bias_ptr + rest, mask=others, other=0.0).to(tl.float32)
        cos_low = tl.load(cos_ptr + offsets, mask=inside, other=0.0)
        cos_high = tl.load(cos_ptr + HALF + offsets, mask=inside, other=0.0)
        sin_low = tl.load(sin_ptr + offsets, mask=inside, other=0.0)
        sin_high = tl.load(sin_ptr + HALF + offsets, mask=inside, other=0.0)
        turned_low, turned_high = rotate(k_low[None, :], k_high[None, :], cos_low, cos_high, sin_low, sin_high)
        pages_ptr += tl.load(slots_ptr + token).to(tl.int64) * ROW + ROW - HEAD_DIM
        tl.store(pages_ptr + offsets[None, :], held(turned_low, pages_ptr, LIMIT), mask=inside[None, :])
        tl.store(pages_ptr + HALF + offsets[None, :], held(turned_high, pages_ptr, LIMIT), mask=inside[None, :])
        tl.store(pages_ptr + rest, held(k_rest, pages_ptr, LIMIT), mask=others)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)
        rows = (head * HEAD_DIM)[:, None]
        own = (head < NUM_HEADS)[:, None]
        q_ptr += token * q_stride
        low, high = load_turned(q_ptr, cos_ptr, sin_ptr, rows, own, HALF, HALF_PADDED, INTERLEAVED)
        mask = own & inside[None, :]
        tl.store(q_ptr + rows + offsets[None, :], low.to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(q_ptr + rows + HALF + offsets[None, :], high.to(q_ptr.dtype.element_ty), mask=mask)


def _sizes(num_heads: int, head_dim: int, rotated: int, row: int) -> dict[str, int]:
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "HALF": rotated // 2,
        "ROW": row,
        "HEADS": min(HEADS, int(triton.next_power_of_2(num_heads))),
        "HALF_PADDED": int(triton.next_power_of_2(rotated // 2)),
        "REST_PADDED": int(triton.next_power_of_2(max(head_dim - rotated, 1))),
    }


def run(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: IndexNorm,
    pages: Tensor,
    slots: Tensor,
    interleaved: bool,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    if not num_tokens:
        return
    sizes = _sizes(num_heads, head_dim, cos.shape[-1], pages.shape[2])
    index_write_kernel[(num_tokens, 1 + triton.cdiv(num_heads, sizes["HEADS"]))](
        q,
        k,
        cos,
        sin,
        norm.weight,
        norm.bias,
        pages,
        slots,
        q.stride(0),
        k.stride(0),
        COS_STRIDE=cos.stride(0),
        SIN_STRIDE=sin.stride(0),
        INTERLEAVED=interleaved,
        LIMIT=limit_of(pages),
        num_warps=1,
        **sizes,
        **options(q.device),
    )


IMPL = Impl(index_write, "triton", run, needs_gpu)


def _aot(name: str, num_heads: int, interleaved: bool, fp8: bool = False) -> AotCase:
    signature: dict[str, Constant] = dict.fromkeys(
        ("q_ptr", "k_ptr", "cos_ptr", "sin_ptr", "weight_ptr", "bias_ptr", "pages_ptr"), "*bf16:16"
    )
    signature |= {"slots_ptr": "*i64", "q_stride": "i32:16", "k_stride": "i32:16", "INTERLEAVED": interleaved}
    signature |= {**_sizes(num_heads, 128, 64, 704), "COS_STRIDE": 128, "SIN_STRIDE": 128, "PDL": False}
    signature |= {"LIMIT": 448.0, "pages_ptr": "*fp8e4nv:16"} if fp8 else {"LIMIT": 0.0}
    return AotCase(name, index_write_kernel, signature, num_warps=1)


AOT = (_aot("deepseek_v32", 64, False), _aot("glm_5", 32, True), _aot("deepseek_v32_fp8", 64, False, True))
