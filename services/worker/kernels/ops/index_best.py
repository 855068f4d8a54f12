"""The slots of the positions that a token attends to: the best of its context by the indexer's scores."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from services.worker.kernels.ops.paged_attention import AttentionRows, make_attention_rows
from services.worker.kernels.registry import Case, Sizes, Tolerance, op


def make_best_case(context: Sequence[int], top_k: int, block_tokens: int = 16, hard: bool = False) -> Case:
    """A row for each context. `hard`: scores of a few values only, and such that are not finite or not a number."""

    def make(dtype: torch.dtype) -> tuple[Tensor, AttentionRows, int]:
        generator = torch.Generator().manual_seed(sum(context) + top_k)
        needed = [-(-length // block_tokens) for length in context]
        pool = torch.randperm(sum(needed) + 3, generator=generator)
        tables = [part.tolist() for part in torch.split(pool[: sum(needed)], needed)]
        rows = make_attention_rows([1] * len(context), context, tables, block_tokens)
        places = torch.randperm(len(context) + 2, generator=generator)[: len(context)]
        scattered = torch.zeros(len(context) + 2, max(rows.block_tables.shape[1], 1), dtype=torch.int32)
        scattered[places, : rows.block_tables.shape[1]] = rows.block_tables
        scores = torch.randn(len(context), max(context, default=0) + 3, generator=generator) * 3 + 1
        if hard:
            few = torch.tensor([0.0, -0.0, 0.0, -0.0, -1.5, 2.0, torch.inf, -torch.inf, torch.nan, -torch.nan])
            for row in range(len(context)):
                some = few[: (len(few), 1, 5, 6)[row % 4]]
                scores[row] = some[torch.randint(len(some), scores.shape[1:], generator=generator)]
        for row, length in enumerate(context):  # nobody may look there
            scores[row, length if length > top_k else 0 :] = torch.nan
        return scores, replace(rows, block_tables=scattered, table_rows=places.to(torch.int32)), top_k

    return Case(f"{len(context)}x{max(context, default=0)}k{top_k}p{block_tokens}{'hard' * hard}", make)


@op(
    cases=[
        make_best_case((300, 5, 20, 21, 64, 65, 0, 517), 20),
        make_best_case((90, 700), 9, 8),
        make_best_case((130, 130, 130, 130, 40, 40, 40, 40), 20, 4, hard=True),
        make_best_case((40,), 50),
        make_best_case((), 7),
    ],
    tolerances={torch.float32: Tolerance(0.0, 0.0, "slots")},
)
def index_best(scores: Tensor, rows: AttentionRows, top_k: int) -> Tensor:
    """Slots of the `top_k` positions of each row's context that have the highest scores, as many as there are columns.

    They are in the order of their positions, of a context of at most `top_k` all; zeros are behind those. Of equal
    scores the first positions are taken; NaN counts as the highest of all. What lies behind a context is not looked at,
    nor the scores of contexts of at most `top_k`.
    scores: float32 [R, at least the longest context], contiguous. Returns a new int32 [R, min(top_k, columns)].
    """
    kept, page = min(top_k, scores.shape[1]), rows.block_tokens
    context = rows.context_lens[:, None]
    hidden = torch.arange(scores.shape[1], device=scores.device) >= context
    ordered = scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(kept, device=scores.device)
    position = torch.where(context > top_k, ordered[:, :kept].sort(-1).values, rank)
    of = torch.arange(len(scores), device=scores.device) if rows.table_rows is None else rows.table_rows.long()
    # behind every context lie no blocks of the row's
    used = (position // page).clamp_(max=rows.block_tables.shape[1] - 1)
    slots = rows.block_tables[of[:, None], used] * page + position % page
    return torch.where(rank < context, slots, 0).to(torch.int32)


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """Of models that choose tokens: contexts of which all is chosen, of some more, and of several times as many."""
    top_k, page = shapes.get("index_top_k", 0), shapes["block_tokens"]
    for rows in sorted({min(rows, 16) for rows in sizes.all}) if top_k else ():
        longest = 5 * top_k + 77
        context = [longest, *(1 + longest * (7 * row + 1) % (longest + row) for row in range(1, rows))]
        yield make_best_case(context, top_k, page)
        yield make_best_case([longest, *context[1:4]], top_k, page, hard=True)
