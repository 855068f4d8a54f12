"""How AITER's latent attention is called: which numbers of heads it has kernels for, and the cache in pages of one.

Kernels are listed in AITER by heads and tokens per row. Others are refused there when a step runs, or wrong without a
word (ROCm/aiter#5679: 16 heads and 8 tokens on gfx942), so heads are padded here and long rows are not asked for.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.impl.aiter._host import Function
from services.worker.kernels.ops.mla_decode import LATENT, ROPE
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.row_parts import bounds_of, slots_of

ARGUMENTS = ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q")
SIXTEEN_QUERIES = (1, 4)  # tokens per row that kernels of 16 heads have on both architectures
WIDER = (32, 64, 128)  # heads whose kernels take any
WIDER_ONCE = (128,)  # and in older releases


def padded_heads(num_heads: int, max_query: int, wider: Sequence[int] = WIDER) -> int | None:
    """The number of heads to call with, or None where there are too many."""
    if num_heads <= 16 and max_query in SIXTEEN_QUERIES:
        return 16
    return next((heads for heads in wider if heads >= num_heads), None)


def padded(q: Tensor, num_heads: int) -> Tensor:
    """q with heads of zeros behind its own; contiguous."""
    return functional.pad(q, (0, 0, 0, num_heads - q.shape[1])).contiguous()


def paged(pages: Tensor) -> Tensor:
    """[P, B, D] as pages of one token and one head; no copy."""
    return pages.view(-1, 1, 1, pages.shape[2])


def slot_lists(rows: AttentionRows) -> tuple[Tensor, Tensor]:
    """int32: where each row's slots begin, [R + 1], and the slots of all positions; made once for all layers.

    With room for the longest contexts, since no host knows those of a step that is replayed.
    """
    if "slots" not in rows.derived:
        bounds = bounds_of(rows)
        slots = slots_of(rows, bounds, len(rows.context_lens) * rows.max_context).to(torch.int32)
        rows.derived["slots"] = bounds, slots
    lists: tuple[Tensor, Tensor] = rows.derived["slots"]
    return lists


def refuses_latent(shapes: Mapping[str, int]) -> str | None:
    latent, rope = shapes.get("kv_lora_rank", LATENT), shapes.get("qk_rope_head_dim", ROPE)
    if (latent, rope) != (LATENT, ROPE):
        return f"latents of {LATENT} and {ROPE} numbers, not of {latent} and {rope}"
    if (row := shapes.get("latent_row", LATENT + ROPE)) != LATENT + ROPE:
        return f"pages of {LATENT + ROPE} numbers a token, not of {row}"
    return "pages of 16 bits" if shapes.get("kv_fp8") else None


def attended(
    function: Function, heads: int, q: tuple[Tensor, Tensor], pages: Tensor, rows: AttentionRows, scale: float
) -> Tensor:
    """By `function`, called with so many heads. q: q_latent and q_rope of the ops."""
    kv_starts, kv_slots = slot_lists(rows)
    num_tokens, num_heads, latent = q[0].shape
    out = torch.empty((num_tokens, heads, latent), dtype=q[0].dtype, device=pages.device)
    function(
        q=padded(torch.cat(q, -1), heads),
        kv_buffer=paged(pages),
        o=out,
        qo_indptr=rows.query_starts,
        kv_indptr=kv_starts,
        kv_indices=kv_slots,
        kv_last_page_lens=torch.ones_like(kv_starts[1:]),
        max_seqlen_q=rows.max_query,
        sm_scale=scale,
    )
    return out[:, :num_heads].contiguous()
