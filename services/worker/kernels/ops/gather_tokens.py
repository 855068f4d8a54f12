"""The first op of a step: token ids that only the device knows, and block tables brought up to date on the way."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op


def make_gather_case(num_tokens: int, num_rows: int, row_len: int, block_tokens: int, resident: bool) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor | int | None, ...]:
        generator = torch.Generator().manual_seed(num_tokens)
        tokens = torch.randint(0, 1000, (num_rows, row_len), generator=generator, dtype=torch.int32)
        # distinct places, so that distinct table entries are written or equal values to one
        places = torch.randperm(num_rows * (row_len - 1), generator=generator)[:num_tokens]
        rows, positions = places // (row_len - 1), places % (row_len - 1)
        blocks = rows * 100 + positions // block_tokens
        slots = blocks * block_tokens + positions % block_tokens
        tables = torch.full((num_rows, -(-row_len // block_tokens)), -1, dtype=torch.int32) if resident else None
        return tokens, tables, rows * row_len + positions, rows.to(torch.int32), positions, slots, block_tokens

    return Case(f"{num_tokens}of{num_rows}x{row_len}{'t' if resident else ''}", make)


EXACT = Tolerance(0.0, 0.0, "integers")


@op(
    cases=[
        make_gather_case(1, 3, 9, 4, True),
        make_gather_case(300, 70, 33, 16, True),
        make_gather_case(5, 4, 40, 8, False),
        make_gather_case(0, 2, 8, 4, True),
    ],
    tolerances={torch.float32: EXACT},
    writes=("tables",),
)
def gather_tokens(
    tokens: Tensor,
    tables: Tensor | None,
    places: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    block_tokens: int,
) -> Tensor:
    """tokens.view(-1)[places], a new int32 [T]; and tables[token_rows, positions // B] = kv_slots // B in place.

    tokens: int32 [rows, L], contiguous; tables: int32 [rows, M], contiguous, or None; places, positions, kv_slots:
    int64 [T]; token_rows: int32 [T]; B is block_tokens. Tokens of one block carry the same block.
    """
    if tables is not None:
        tables.index_put_((token_rows.long(), positions // block_tokens), (kv_slots // block_tokens).to(torch.int32))
    return tokens.view(-1).index_select(0, places)
