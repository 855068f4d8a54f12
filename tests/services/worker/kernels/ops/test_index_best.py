"""The meaning by sorting each row's context, and what the docstring promises of special rows."""

import math

import torch

from services.worker.kernels.ops.index_best import index_best, make_best_case
from services.worker.kernels.ops.paged_attention import make_attention_rows


def test_equals_sorting() -> None:
    for case in (*index_best.cases, make_best_case((33, 70, 9), 32, 4, hard=True)):
        scores, rows, top_k = case.make(torch.float32)
        got = index_best.meaning(scores, rows, top_k)
        assert got.dtype == torch.int32 and got.shape == (len(scores), min(top_k, scores.shape[1]))
        for row, context in enumerate(rows.context_lens.tolist()):
            values = [math.inf if math.isnan(value) else value for value in scores[row, :context].tolist()]
            unknown = scores[row, :context].isnan().tolist()
            order = sorted(range(context), key=lambda at: (not unknown[at], -values[at], at))
            taken = sorted(order[:top_k]) if context > top_k else list(range(context))
            page, table = rows.block_tokens, rows.tables[row].tolist()
            slots = [table[at // page] * page + at % page for at in taken]
            assert got[row].tolist() == slots + [0] * (got.shape[1] - len(slots)), (case.name, row)


def test_the_first_of_equal_scores_are_taken() -> None:
    rows = make_attention_rows([1, 1], [6, 3], [[1, 0], [2]], 4)
    scores = torch.tensor([[0.0, 1.0, -0.0, 0.0, torch.nan, -1.0, torch.nan, 9.0], [torch.nan] * 8])
    assert index_best.meaning(scores, rows, 4).tolist() == [[4, 5, 6, 0], [8, 9, 10, 0]]
