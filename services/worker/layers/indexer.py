"""Which tokens of its context a token attends to: DeepSeek-V3.2's lightning indexer, and GLM-5's, which layers share.

Scores are relu(q_h . k) of each index head, summed with the token's own weights (DeepSeek-V3.2-Exp's report, equation
1); the best `top_k` positions are attended to. Index keys lie behind the latents in the rows of the same pages. The
choice is kept with the step's rows, where layers without an indexer of their own find it.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.kernels.ops.index_best import index_best
from services.worker.kernels.ops.index_scores import index_scores
from services.worker.kernels.ops.index_write import IndexNorm, index_write
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Bindings
from services.worker.kernels.row_parts import by_token
from services.worker.models.spec_latent import IndexerSpec

SCORES_BYTES = 256 << 20  # of one piece of a step's tokens, with what is kept to find the best
BYTES = 6  # of a score, and of its place among those that may be chosen
COLUMNS = 16  # rows of scores are a multiple, so that kernels read several at once
EVERY = slice(None)


class IndexQueries(NamedTuple):
    """q: [T, H, D]; k: [T, D]; neither rotated. weights: float32 [T, H]."""

    q: Tensor
    k: Tensor
    weights: Tensor


class Indexer:
    def __init__(self, spec: IndexerSpec, norm: IndexNorm, bindings: Bindings) -> None:
        """`norm`: of the keys."""
        self.norm, self._spec = norm, spec
        self._write, self._scores, self._take = bindings(index_write), bindings(index_scores), bindings(index_best)

    def write(self, given: IndexQueries, rotation: tuple[Tensor, Tensor], pages: Tensor, slots: Tensor) -> None:
        """Rotates the queries in place; the keys go into the pages."""
        self._write(given.q, given.k, *rotation, self.norm, pages, slots, self._spec.interleaved)

    def choose(self, given: IndexQueries, pages: Tensor, rows: AttentionRows) -> None:
        """Keeps with the rows what `chosen` gives. The queries are rotated, the keys in the pages."""
        single, width = by_token(rows, len(given.q)), rows.max_context
        together = max(SCORES_BYTES // (BYTES * width), 1)
        slots = []
        for first in range(0, len(given.q), together):
            some = part_of_tokens(single, first, min(first + together, len(given.q)), rows.num_decode)
            slots.append(self._best(given, pages, some, width, first))
        rows.derived["chosen"] = AttentionRows(
            query_starts=single.query_starts,
            context_lens=single.context_lens.clamp(max=self._spec.top_k),
            block_tables=slots[0] if len(slots) == 1 else torch.cat(slots),
            block_tokens=1,
            max_query=1,
            max_context=min(self._spec.top_k, width),
            num_decode=len(given.q),
        )

    def _best(self, given: IndexQueries, pages: Tensor, rows: AttentionRows, width: int, first: int) -> Tensor:
        """int32 [t, K]: slots in the order of positions, behind a context shorter than K zeros."""
        tokens = slice(first, first + len(rows.context_lens))
        line = -(-width // COLUMNS) * COLUMNS
        scores = torch.empty((len(rows.context_lens), line), dtype=torch.float32, device=given.q.device)
        self._scores(given.q[tokens], given.weights[tokens], pages, rows, scores, self._spec.top_k)
        return self._take(scores, rows, min(self._spec.top_k, width))


def part_of_tokens(rows: AttentionRows, first: int, last: int, num_decode: int) -> AttentionRows:
    """Of rows that have one token each; of all, the first `num_decode` are of sequences of their own."""
    assert rows.table_rows is not None
    return AttentionRows(
        query_starts=rows.query_starts[: last - first + 1],
        context_lens=rows.context_lens[first:last],
        block_tables=rows.block_tables,
        block_tokens=rows.block_tokens,
        max_query=1,
        max_context=rows.max_context,
        num_decode=min(max(num_decode - first, 0), last - first),
        table_rows=rows.table_rows[first:last],
    )


def chosen(rows: AttentionRows, tokens: slice = EVERY) -> AttentionRows:
    """Each token, or each of some, as a row of its own, its context the chosen tokens, in pages of one token."""
    found: AttentionRows = rows.derived["chosen"]
    if tokens == EVERY:
        return found
    context = found.context_lens[tokens]
    return replace(
        found,
        query_starts=found.query_starts[: len(context) + 1],
        context_lens=context,
        block_tables=found.block_tables[tokens],
        num_decode=len(context),
    )
