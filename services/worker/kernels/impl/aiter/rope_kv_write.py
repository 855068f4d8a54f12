"""Norm and rotation of heads, and the new keys and values into their pages, in as few of AITER's calls as can be.

Into shuffled pages one call does all of it, with the norm of heads or without (two kernels of AITER with different
limits). Everything else goes by AITER's norm, rotation and write one after the other.
"""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.impl.aiter._norm import RMS_NORM, normed
from services.worker.kernels.impl.aiter._pages import (
    WRITE_BY_TOKEN,
    layout_of,
    refuses_reading,
    refuses_writing,
    unused_scale,
    write,
)
from services.worker.kernels.impl.aiter._rotation import PACKED, ROTATE_BOTH, both_rotated
from services.worker.kernels.impl.aiter._triton import at
from services.worker.kernels.layout import TOKENS
from services.worker.kernels.ops.kv_write import KvScale, kv_write
from services.worker.kernels.ops.rope_kv_write import HeadNorm, rope_kv_write
from services.worker.kernels.registry import Facts, Impl

NORM_ROTATE_WRITE = Function(
    "aiter:fused_qk_norm_rope_cache_quant_shuffle",
    needs=(
        "q",
        "k",
        "v",
        "num_heads_q",
        "num_heads_k",
        "num_heads_v",
        "head_dim",
        "eps",
        "qw",
        "kw",
        "cos_sin_cache",
        "is_neox_style",
        "pos_ids",
        "k_cache",
        "v_cache",
        "slot_mapping",
        "kv_cache_dtype",
        "k_scale",
        "v_scale",
    ),
)
_ROTATE_WRITE = at("fusions.fused_kv_cache:fused_qk_rope_reshape_and_cache")
_ROTATE_WRITE_NEEDS = (
    "q",
    "k",
    "v",
    "key_cache",
    "value_cache",
    "slot_mapping",
    "pos",
    "cos",
    "sin",
    "k_scale",
    "v_scale",
    "is_neox",
    "flash_layout",
    "apply_scale",
    "q_out",
    "output_zeros",
)
# releases without `upcast_operand` cannot write shuffled values yet
ROTATE_WRITE = Function(*_ROTATE_WRITE, needs=(*_ROTATE_WRITE_NEEDS, "upcast_operand"))
ROTATE_WRITE_BY_TOKEN = Function(*_ROTATE_WRITE, needs=_ROTATE_WRITE_NEEDS, takes=("upcast_operand",))
NORMED_HEAD_DIMS = (64, 128, 256)
MOST_KV_HEADS = 32  # of the call with the norm


def rope_and_write_pages(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    head_norm: HeadNorm | None,
    kv_scale: KvScale | None,
) -> Tensor:
    head_dim = v_cache.shape[3]
    num_kv_heads = v_cache.shape[1] if v_cache.dim() == 5 else v_cache.shape[2]
    heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)
    v_start = heads.shape[1] - num_kv_heads
    q, k, v = heads[:, : v_start - num_kv_heads], heads[:, v_start - num_kv_heads : v_start], heads[:, v_start:]
    if not len(qkv):
        return torch.empty_like(q)
    # 8 bits are for `write`, which saturates; these kernels turn whole heads
    if v_cache.dim() == 5 and kv_scale is None and cos.shape[-1] == head_dim:
        if head_norm is not None and _takes_norm(num_kv_heads, head_dim):
            return _norm_rotate_write((q, k, v), (cos, sin), (k_cache, v_cache), slots, head_norm)
        if head_norm is None and _takes_rotation(k_cache):
            return _rotate_write((q, k, v), (cos, sin), (k_cache, v_cache), slots)
    if head_norm is not None:
        q, k = normed(q, head_norm.q, head_norm.eps), normed(k, head_norm.k, head_norm.eps)
    if _lacks_write(v_cache):
        if cos.shape[-1] == head_dim:
            return _rotate_write((q, k, v), (cos, sin), (k_cache, v_cache), slots)
        q, k = both_rotated(q, k, cos, sin)
        kv_write.meaning(k, v, k_cache, v_cache, slots, kv_scale)
        return q
    q, k = both_rotated(q, k, cos, sin)
    write(k, v, k_cache, v_cache, slots, kv_scale)
    return q


def _takes_norm(num_kv_heads: int, head_dim: int) -> bool:
    return head_dim in NORMED_HEAD_DIMS and num_kv_heads <= MOST_KV_HEADS and NORM_ROTATE_WRITE.missing() is None


def _takes_rotation(k_cache: Tensor) -> bool:
    _, _, chunks, block_tokens, lanes = k_cache.shape
    head_dim = chunks * lanes
    powers = not head_dim & (head_dim - 1) and not block_tokens & (block_tokens - 1)
    # it has no pages of float16
    return powers and k_cache.dtype != torch.float16 and ROTATE_WRITE.missing() is None


def _lacks_write(v_cache: Tensor) -> bool:
    return v_cache.dim() == 4 and WRITE_BY_TOKEN.missing() is not None


def _norm_rotate_write(
    heads: tuple[Tensor, Tensor, Tensor],
    rotation: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    slots: Tensor,
    norm: HeadNorm,
) -> Tensor:
    """Queries and keys are changed where they lie (`qkv` is scratch). Returns a view."""
    q, k, v = heads
    angles, places = PACKED(*rotation)
    unused = unused_scale(q.device)
    NORM_ROTATE_WRITE(
        q=q,
        k=k,
        v=v,
        num_heads_q=q.shape[1],
        num_heads_k=k.shape[1],
        num_heads_v=v.shape[1],
        head_dim=q.shape[2],
        eps=norm.eps,
        qw=norm.q,
        kw=norm.k,
        cos_sin_cache=angles,
        is_neox_style=True,
        pos_ids=places,
        k_cache=pages[0],
        v_cache=pages[1],
        slot_mapping=slots,
        kv_cache_dtype="auto",
        k_scale=unused,
        v_scale=unused,
    )
    return q


def _rotate_write(
    heads: tuple[Tensor, Tensor, Tensor], rotation: tuple[Tensor, Tensor], pages: tuple[Tensor, Tensor], slots: Tensor
) -> Tensor:
    q, k, v = heads
    angles, places = PACKED(*rotation)
    cosines, sines = angles.chunk(2, -1)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shuffled = pages[1].dim() == 5
    (ROTATE_WRITE if shuffled else ROTATE_WRITE_BY_TOKEN)(
        q=q,
        k=k,
        v=v,
        key_cache=pages[0],
        value_cache=pages[1],
        slot_mapping=slots,
        pos=places,
        cos=cosines,
        sin=sines,
        k_scale=None,
        v_scale=None,
        is_neox=True,
        flash_layout=not shuffled,
        apply_scale=False,
        q_out=out,
        output_zeros=False,
        upcast_operand=True,
    )
    return out


def refuses(facts: Facts) -> str | None:
    writes = None if _rotates_and_writes(facts) else refuses_writing(facts)
    return refuses_reading(facts) or writes or refusal(facts, RMS_NORM, ROTATE_BOTH)


def _rotates_and_writes(facts: Facts) -> bool:
    """Where nothing only writes (installations without the compiled part): pages by token of 16 bits."""
    head_dim = facts.shapes.get("head_dim", 128)
    fits = layout_of(facts) == TOKENS and not facts.shapes.get("kv_fp8") and not head_dim & (head_dim - 1)
    return fits and refusal(facts, ROTATE_WRITE_BY_TOKEN) is None


IMPL = Impl(rope_kv_write, "aiter", rope_and_write_pages, refuses, layout_of)
