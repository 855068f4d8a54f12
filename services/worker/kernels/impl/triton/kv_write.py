"""One program copies one token's keys and values, all heads."""

import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.impl.triton._rotary import limit_of, own_scale, scaled, stored
from services.worker.kernels.ops.kv_write import KvScale, kv_write
from services.worker.kernels.registry import Impl


@triton.jit
def _kv_write(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    LIMIT: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    """k, v: [T, NUM_HEADS, HEAD_DIM] by their strides; caches: [slots, NUM_HEADS, HEAD_DIM]; slots: int64 [T].

    With EACH scales are [slots, NUM_HEADS], and written.
    """
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_PADDED)[:, None], tl.arange(0, DIM_PADDED)[None, :]
    mask = (heads < NUM_HEADS) & (dims < HEAD_DIM)
    release(PDL)
    wait(PDL)
    slot = tl.load(slots_ptr + token).to(tl.int64) * NUM_HEADS
    place = (slot + heads) * HEAD_DIM + dims
    k = tl.load(k_ptr + token * k_stride_t + heads * k_stride_h + dims, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * v_stride_t + heads * v_stride_h + dims, mask=mask, other=0.0)
    if EACH:
        head = tl.arange(0, HEADS_PADDED)
        largest_k, largest_v = tl.max(tl.abs(k.to(tl.float32)), 1), tl.max(tl.abs(v.to(tl.float32)), 1)
        k_scale = own_scale(largest_k, k_scale_ptr + slot + head, head < NUM_HEADS, LIMIT)
        v_scale = own_scale(largest_v, v_scale_ptr + slot + head, head < NUM_HEADS, LIMIT)
        tl.store(k_cache_ptr + place, scaled(k, k_cache_ptr, k_scale, LIMIT), mask=mask)
        tl.store(v_cache_ptr + place, scaled(v, v_cache_ptr, v_scale, LIMIT), mask=mask)
    else:
        tl.store(k_cache_ptr + place, stored(k, k_cache_ptr, k_scale_ptr, LIMIT), mask=mask)
        tl.store(v_cache_ptr + place, stored(v, v_cache_ptr, v_scale_ptr, LIMIT), mask=mask)


def kv_write_tokens(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, kv_scale: KvScale | None
) -> None:
    num_tokens, num_heads, head_dim = k.shape
    if not num_tokens:
        return
    _kv_write[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        kv_scale and kv_scale.k,
        kv_scale and kv_scale.v,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS_PADDED=triton.next_power_of_2(num_heads),
        DIM_PADDED=triton.next_power_of_2(head_dim),
        LIMIT=limit_of(k_cache),
        EACH=kv_scale is not None and kv_scale.each,
        num_warps=2,
        **options(k.device),
    )


IMPL = Impl(kv_write, "triton", kv_write_tokens, needs_gpu, scales_each=True)

_SIGNATURE: dict[str, Constant] = {
    "k_ptr": "*bf16:16",
    "v_ptr": "*bf16:16",
    "k_cache_ptr": "*bf16:16",
    "v_cache_ptr": "*bf16:16",
    "slots_ptr": "*i64:16",
    "k_scale_ptr": None,
    "v_scale_ptr": None,
    "k_stride_t": "i32:16",
    "k_stride_h": "i32:16",
    "v_stride_t": "i32:16",
    "v_stride_h": "i32:16",
    "NUM_HEADS": 8,
    "HEAD_DIM": 128,
    "HEADS_PADDED": 8,
    "DIM_PADDED": 128,
    "LIMIT": 0.0,
    "EACH": False,
    "PDL": False,
}
AOT = (AotCase("8x128", _kv_write, _SIGNATURE, num_warps=2, hot=False),)
