"""Rows of a dense table by token id."""

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.registry import Case, Tolerance, op


def make_embedding_case(num_tokens: int, rows: int, width: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(num_tokens)
        ids = torch.randint(0, rows, (num_tokens,), generator=generator, dtype=torch.int32)
        return ids, torch.randn(rows, width, generator=generator).to(dtype)

    return Case(f"{num_tokens}of{rows}x{width}", make)


EXACT = Tolerance(0.0, 0.0, "a copy")


@op(
    cases=[make_embedding_case(1, 50, 576), make_embedding_case(40, 7, 33), make_embedding_case(0, 5, 8)],
    tolerances={torch.float32: EXACT, torch.bfloat16: EXACT, torch.float16: EXACT},
)
def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """table[ids]. ids: int32 or int64 [T], each in [0, rows); table: [rows, N]; returns a new [T, N]."""
    return functional.embedding(ids, table)
