"""Multi-head latent attention of prompts and chunks on the latent cache, its up-projections absorbed.

Cheaper un-absorbed where nothing is cached; this is for chunks whose context lies in the cache.
"""

from torch import Tensor

from services.worker.kernels.ops.mla_decode import MLA_TOLERANCES, latent_attention, make_mla_case
from services.worker.kernels.registry import op


@op(
    cases=[
        make_mla_case((20,), (20,), 16),
        make_mla_case((7, 30), (100, 31), 16),
        make_mla_case((5,), (64,), 20),
    ],
    tolerances=MLA_TOLERANCES,
)
def mla_prefill(
    q: Tensor,
    cache: Tensor,
    query_starts: Tensor,
    kv_starts: Tensor,
    kv_slots: Tensor,
    max_query: int,
    latent: int,
    scale: float,
) -> Tensor:
    """As mla_decode, for rows of any number of tokens."""
    return latent_attention(q, cache, query_starts, kv_starts, kv_slots, latent, scale)
