"""Multi-head latent attention of prompts and chunks on the paged cache, its up-projections absorbed.

Cheaper un-absorbed (mla_expanded) for many tokens; this is for shorter chunks, and where a step is replayed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from services.worker.kernels.ops.mla_decode import MLA_TOLERANCES, latent_attention, latent_case, make_mla_case
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Case, Sizes, op

# more tokens than are read as rows that decode
SMALL: tuple[Any, ...] = (
    ((66, 1, 9), (90, 17, 9), 6, (24, 8), 8, 16),
    ((70, 2), (70, 50), 128, (64, 16), 16, 0, True),
    ((66, 1), (70, 40), 8, (64, 16), 16, 16, False, 1),
)


@op(
    cases=[
        make_mla_case((5,), (64,), 20),
        make_mla_case((3, 8), (30, 9), 16, table_rows=True),
        *(make_mla_case(*small) for small in SMALL),
    ],
    tolerances=MLA_TOLERANCES,
)
def mla_prefill(q_latent: Tensor, q_rope: Tensor, pages: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    """As mla_decode, for rows of any number of tokens."""
    return latent_attention(q_latent, q_rope, pages, rows, scale)


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """Of models with latent attention."""
    for tokens in sizes.prompt if shapes.get("kv_lora_rank") else ():
        yield latent_case(shapes, [1, tokens], [5, tokens + 777])
