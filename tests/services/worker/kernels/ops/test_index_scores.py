"""The meaning token by token, head by head."""

import torch

from services.worker.kernels.ops.index_scores import index_scores


def test_equals_formula() -> None:
    for dtype, tolerance in index_scores.tolerances.items():
        for case in index_scores.cases:
            q, weights, pages, rows, width = case.make(dtype)
            got = index_scores.meaning(q, weights, pages, rows, width)
            assert got.shape == (len(q), width) and got.dtype == torch.float32
            for token, context in enumerate(rows.context_lens.tolist()):
                position = torch.arange(context)
                block = rows.block_tables[token, position // rows.block_tokens].long()
                keys = pages[block, position % rows.block_tokens, -q.shape[2] :].double()
                wanted = sum(
                    weights[token, head].double() * (keys @ q[token, head].double()).clamp(min=0)
                    for head in range(q.shape[1])
                )
                assert isinstance(wanted, torch.Tensor) and bool((got[token, context:] == -torch.inf).all())
                torch.testing.assert_close(
                    got[token, :context].double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute
                )
