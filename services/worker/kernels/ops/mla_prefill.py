"""Multi-head latent attention of prompts and chunks on the paged cache, its up-projections absorbed.

Cheaper un-absorbed (mla_expanded) for many tokens; this is for shorter chunks, and where a step is replayed.
"""

from torch import Tensor

from services.worker.kernels.ops.mla_decode import MLA_TOLERANCES, latent_attention, make_mla_case
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import op


@op(
    cases=[
        make_mla_case((20,), (20,), 16),
        make_mla_case((7, 30), (100, 31), 16, table_rows=True),
        make_mla_case((5,), (64,), 20),
        make_mla_case((40, 1, 9), (90, 17, 9), 6, (24, 8), 8, more=16),
        make_mla_case((70, 2), (70, 150), 8, (64, 16)),
    ],
    tolerances=MLA_TOLERANCES,
)
def mla_prefill(q_latent: Tensor, q_rope: Tensor, pages: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    """As mla_decode, for rows of any number of tokens."""
    return latent_attention(q_latent, q_rope, pages, rows, scale)
