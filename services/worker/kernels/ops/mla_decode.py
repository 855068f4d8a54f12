"""Multi-head latent attention (DeepSeek-V2) of decode rows on the latent cache, its up-projections absorbed.

All heads share one latent per position: keys are the whole of it, values its first `latent` numbers.
"""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op

MAX_VERIFY = 4  # tokens of a row: one, and up to three drafts to verify
LATENT, ROPE = 512, 64  # of all published models

MLA_TOLERANCES = {
    torch.float32: Tolerance(1e-4, 1e-5, "order of sums, online softmax"),
    torch.bfloat16: Tolerance(2e-2, 1e-2, "probabilities rounded to 8 bits, and the result"),
    torch.float16: Tolerance(3e-3, 2e-3, "probabilities rounded to 11 bits, and the result"),
}


def make_mla_case(queries: tuple[int, ...], context: tuple[int, ...], num_heads: int) -> Case:
    """Rows with so many tokens and so many cached positions, these scattered over the cache."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float]:
        generator = torch.Generator().manual_seed(sum(context) + num_heads)
        width, total = LATENT + ROPE, sum(context)
        q = torch.randn(sum(queries), num_heads, width, generator=generator)
        cache = torch.randn(total + 16, width, generator=generator)
        slots = torch.randperm(total + 16, generator=generator)[:total].to(torch.int32)
        starts = [torch.tensor((0, *counts)).cumsum(0).to(torch.int32) for counts in (queries, context)]
        return q.to(dtype), cache.to(dtype), *starts, slots, max(queries), LATENT, 192**-0.5

    name = f"{len(queries)}x{max(queries)}x{max(context)}h{num_heads}"
    return Case(name, make)


def latent_attention(
    q: Tensor, cache: Tensor, query_starts: Tensor, kv_starts: Tensor, kv_slots: Tensor, latent: int, scale: float
) -> Tensor:
    """Every token against every listed slot, what is not its own masked: no value decides what is computed."""
    token = torch.arange(len(q), device=q.device)
    place = torch.arange(len(kv_slots), device=q.device)
    row = torch.searchsorted(query_starts, token, right=True) - 1
    kv_row = torch.searchsorted(kv_starts, place, right=True) - 1
    # a row's tokens are the last of its context
    last = kv_starts[1:][row] - query_starts[1:][row] + token
    seen = (row[:, None] == kv_row) & (place <= last[:, None])
    keys = cache.index_select(0, kv_slots).float()
    scores = torch.einsum("thd,kd->htk", q.float(), keys) * scale
    shares = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("htk,kd->thd", shares, keys[:, :latent]).to(q.dtype)


@op(
    cases=[
        make_mla_case((1,), (77,), 16),
        make_mla_case((1, 1, 1), (5, 300, 1), 128),
        make_mla_case((4, 4), (40, 4), 16),
        make_mla_case((2, 3, 1), (9, 200, 33), 20),
    ],
    tolerances=MLA_TOLERANCES,
)
def mla_decode(
    q: Tensor,
    cache: Tensor,
    query_starts: Tensor,
    kv_starts: Tensor,
    kv_slots: Tensor,
    max_query: int,
    latent: int,
    scale: float,
) -> Tensor:
    """softmax(q @ keys.T * scale) @ keys[:, :latent], causal. Returns a new [T, H, latent].

    q: [T, H, D], query and its rotary part; cache: [S, D]; row j has tokens query_starts[j] to query_starts[j + 1] - 1
    (int32 [R + 1]; `max_query` the most, at most 4), the last of its context, which lies in the cache's slots
    kv_slots[kv_starts[j]] to kv_slots[kv_starts[j + 1] - 1] (int32 [R + 1] and [at least the sum]).
    """
    return latent_attention(q, cache, query_starts, kv_starts, kv_slots, latent, scale)
