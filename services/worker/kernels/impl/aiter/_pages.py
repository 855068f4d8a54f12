"""AITER's calls that write and read the pages of the KV cache, and the layout that they want.

Shuffled pages where the host's AITER can write them and read them under every kind of attention, because its fastest
kernels (pa_fwd_asm for decode, the CK kernels for chunks of prompts) read only those; else pages by token. A sort of
attention that a kernel lacks is routed to another one, never left out: `unified_attention` has them all.
"""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.impl.aiter._kept import Kept
from services.worker.kernels.impl.aiter._triton import at
from services.worker.kernels.layout import SHUFFLED, TOKENS, suits
from services.worker.kernels.ops.kv_write import KvScale
from services.worker.kernels.registry import Facts

WRITE = Function(
    "aiter:reshape_and_cache",
    needs=(
        "key",
        "value",
        "key_cache",
        "value_cache",
        "slot_mapping",
        "kv_cache_dtype",
        "k_scale",
        "v_scale",
        "asm_layout",
    ),
)
WRITE_BY_TOKEN = Function(
    "aiter:reshape_and_cache_flash",
    needs=("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale"),
)
_UNIFIED = at("attention.unified_attention:unified_attention")
_UNIFIED_NEEDS = (
    "q",
    "k",
    "v",
    "out",
    "cu_seqlens_q",
    "max_seqlen_q",
    "seqused_k",
    "max_seqlen_k",
    "softmax_scale",
    "causal",
    "window_size",
    "block_table",
    "softcap",
    "q_descale",
    "k_descale",
    "v_descale",
    "sinks",
)
UNIFIED = Function(*_UNIFIED, needs=_UNIFIED_NEEDS)
UNIFIED_SHUFFLED = Function(*_UNIFIED, needs=(*_UNIFIED_NEEDS, "shuffled_kv_cache"))
READS = {SHUFFLED: UNIFIED_SHUFFLED, TOKENS: UNIFIED}
WRITES = {SHUFFLED: WRITE, TOKENS: WRITE_BY_TOKEN}
HEAD_DIMS = range(32, 257, 16)  # of unified_attention: tiles of the matrix instructions
BLOCK_TOKENS = (16, 32, 64, 128)  # a page is a tile of unified_attention, or a part of one


def layout_of(facts: Facts) -> str:
    """What `Impl.layout` asks: the same answer for all ops of this provider."""
    return TOKENS if _refuses(SHUFFLED, facts, WRITES[SHUFFLED], READS[SHUFFLED]) else SHUFFLED


def refuses_reading(facts: Facts) -> str | None:
    """As `refusal`, for an op that reads pages of the layout above."""
    layout = layout_of(facts)
    return _refuses(layout, facts, READS[layout])


def refuses_writing(facts: Facts) -> str | None:
    """As `refusal`, for an op that writes pages of the layout above."""
    layout = layout_of(facts)
    return _refuses(layout, facts, WRITES[layout])


def _refuses(layout: str, facts: Facts, *functions: Function) -> str | None:
    head_dim, block_tokens = facts.shapes.get("head_dim", 128), facts.shapes.get("block_tokens", 16)
    if head_dim not in HEAD_DIMS:
        return f"attends with heads of multiples of 16 from 32 to 256, not of {head_dim}"
    if facts.shapes.get("own_values"):
        return "attends with values as large as keys, and not scaled"
    if block_tokens not in BLOCK_TOKENS:
        return f"reads pages of {', '.join(map(str, BLOCK_TOKENS))} tokens, not of {block_tokens}"
    if not suits(layout, head_dim, block_tokens, torch.int8 if facts.shapes.get("kv_fp8") else facts.dtype):
        return f"shuffles no pages of {block_tokens} tokens with heads of {head_dim}"
    return refusal(facts, *functions)


def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, kv_scale: KvScale | None) -> None:
    """As the op `kv_write`, into pages of either layout."""
    if kv_scale is not None:
        # AITER's conversion does not saturate: what is too large would become NaN, and stay in the cache
        k, v = _within(k, kv_scale.k, k_cache), _within(v, kv_scale.v, v_cache)
    arguments = {
        "key": _dense_heads(k),
        "value": _dense_heads(v),
        "key_cache": k_cache,
        "value_cache": v_cache,
        "slot_mapping": slots,
        "kv_cache_dtype": "auto" if kv_scale is None else "fp8",
    }
    if k_cache.dim() == 5:
        scales: tuple[Tensor | None, Tensor | None] = kv_scale or (None, None)
        WRITE(k_scale=scales[0], v_scale=scales[1], asm_layout=True, **arguments)
    else:
        unused = unused_scale(k.device)
        k_scale, v_scale = kv_scale or (unused, unused)
        WRITE_BY_TOKEN(k_scale=k_scale, v_scale=v_scale, **arguments)


def unused_scale(device: torch.device) -> Tensor:
    """Some calls want scales also for pages of 16 bits: they read one number and do nothing with it."""
    return torch.empty(1, dtype=torch.float32, device=device)


def bounds(scale: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest number that pages of 8 bits hold at this scale. Without dimensions, so that clamping
    by them keeps a dtype. Rounded to 16 bits they may be a little larger, by less than what still rounds to them.
    """
    largest = scale.squeeze() * torch.finfo(pages.dtype).max
    return -largest, largest


_BOUNDS = Kept(bounds)


def _within(x: Tensor, scale: Tensor, pages: Tensor) -> Tensor:
    """x where the pages can hold x / scale, else the nearest that they can. scale: float32 [1]."""
    return x.clamp(*_BOUNDS(scale, pages))


def _dense_heads(x: Tensor) -> Tensor:
    """AITER takes the stride of tokens only. x: [T, K, D]."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
