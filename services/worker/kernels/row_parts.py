"""Parts of a step's rows, and what follows from them, made once per step for all layers of latent attention. Pure.

`AttentionRows` lists rows that decode first. Decode rows and chunks go to different ops here, and some want the slots
of whole contexts.
"""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.paged_attention import AttentionRows


class RowParts:
    @staticmethod
    def of(rows: AttentionRows) -> "RowParts":
        """Those that an earlier layer made, if one did."""
        if "parts" not in rows.derived:
            rows.derived["parts"] = RowParts(rows)
        parts: RowParts = rows.derived["parts"]
        return parts

    def __init__(self, rows: AttentionRows) -> None:
        self.rows = rows
        self.num_decode = rows.num_decode
        self.num_chunks = len(rows.context_lens) - rows.num_decode

    @cached_property
    def decode(self) -> AttentionRows:
        """The first `num_decode` rows."""
        return part_of(self.rows, slice(0, self.num_decode)) if self.num_chunks else self.rows

    @cached_property
    def chunks(self) -> AttentionRows:
        """The rows behind those."""
        return part_of(self.rows, slice(self.num_decode, None)) if self.num_decode else self.rows

    @cached_property
    def chunk_bounds(self) -> Tensor:
        """int32 [chunks + 1]: where each chunk's positions begin in `chunk_slots`."""
        return bounds_of(self.chunks)

    @cached_property
    def chunk_slots(self) -> Tensor:
        """int64: the slots of all positions of the chunks' contexts, one row behind the other."""
        load = self.rows.chunk_load
        assert load is not None, "the host does not know the contexts of a step that is replayed"
        return slots_of(self.chunks, self.chunk_bounds, load.context)


def by_token(rows: AttentionRows, num_tokens: int) -> AttentionRows:
    """Each of the rows' tokens as a row of its own, whose context ends with it."""
    if "by_token" not in rows.derived:
        token = torch.arange(num_tokens, device=rows.context_lens.device)
        row = torch.searchsorted(rows.query_starts, token, right=True) - 1
        context = rows.context_lens[row] - (rows.query_starts[row + 1] - 1 - token)
        table_rows = row if rows.table_rows is None else rows.table_rows[row]
        rows.derived["by_token"] = replace(
            rows,
            query_starts=torch.arange(num_tokens + 1, dtype=torch.int32, device=token.device),
            context_lens=context.to(torch.int32),
            table_rows=table_rows.to(torch.int32),
            max_query=1,
            num_decode=num_tokens,
        )
    single: AttentionRows = rows.derived["by_token"]
    return single


def part_of(rows: AttentionRows, part: slice) -> AttentionRows:
    """Either the first rows or the last ones; these begin at the token behind `num_decode`."""
    first = part.start or 0
    starts = rows.chunk_starts if first else rows.query_starts[: part.stop + 1]
    tables = rows.block_tables if rows.table_rows is not None else rows.block_tables[part]
    return replace(
        rows,
        query_starts=starts,
        context_lens=rows.context_lens[part],
        block_tables=tables,
        table_rows=None if rows.table_rows is None else rows.table_rows[part],
        max_query=rows.max_query if first else 1,
        num_decode=0 if first else rows.num_decode,
    )


def bounds_of(rows: AttentionRows) -> Tensor:
    """int32 [R + 1]: sums of the contexts before each row."""
    return functional.pad(rows.context_lens.cumsum(0, dtype=torch.int32), (1, 0))


def slots_of(rows: AttentionRows, bounds: Tensor, size: int) -> Tensor:
    """int64 [size], `size` at least the sum of all contexts; what is behind them is some slot of the last row."""
    place = torch.arange(size, device=bounds.device)
    row = (torch.searchsorted(bounds, place, right=True) - 1).clamp_(max=len(rows.context_lens) - 1)
    position = (place - bounds[row]).minimum(rows.context_lens[row] - 1).clamp_(min=0)
    block = rows.tables[row, position // rows.block_tokens].to(torch.int64)
    return block * rows.block_tokens + position % rows.block_tokens
