"""The meaning token by token, head by head."""

from dataclasses import replace

import pytest
import torch

from services.worker.kernels.ops import index_scores as module
from services.worker.kernels.ops.index_scores import index_scores
from services.worker.kernels.ops.paged_attention import make_attention_rows


def test_equals_formula() -> None:
    for dtype, tolerance in index_scores.tolerances.items():
        for case in index_scores.cases:
            q, weights, pages, rows, got, top_k = case.make(dtype)
            before = got.clone()
            index_scores.meaning(q, weights, pages, rows, got, top_k)
            for token, context in enumerate(rows.context_lens.tolist()):
                context = context if context > top_k else 0
                assert torch.equal(got[token, context:], before[token, context:])
                position = torch.arange(context)
                block = rows.tables[token, position // rows.block_tokens].long()
                keys = pages[block, position % rows.block_tokens, -q.shape[2] :].double()
                wanted = sum(
                    weights[token, head].double() * (keys @ q[token, head].double()).clamp(min=0)
                    for head in range(q.shape[1])
                )
                assert isinstance(wanted, torch.Tensor)
                torch.testing.assert_close(
                    got[token, :context].double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute
                )


@pytest.mark.parametrize("together", [2, 16])
def test_tokens_of_one_sequence_share_its_keys(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows with a table each give; a sequence may come twice, and others between."""
    monkeypatch.setattr(module, "TOGETHER", together)
    generator = torch.Generator().manual_seed(3)
    tables = torch.randperm(12, generator=generator).view(3, 4).to(torch.int32)
    pages = torch.randn(12, 8, 20, generator=generator)
    of = torch.tensor([1, 1, 1, 1, 1, 0, 2, 2, 1], dtype=torch.int32)
    context = [26, 27, 28, 29, 30, 9, 1, 2, 31]
    rows = make_attention_rows([1] * 9, context, tables[of.long()].tolist(), 8)
    q, weights = torch.randn(9, 5, 8, generator=generator), torch.randn(9, 5, generator=generator)
    shared = replace(rows, block_tables=tables, table_rows=of)
    alone, sharing = torch.full((2, 9, 33), torch.nan)
    index_scores.meaning(q, weights, pages, rows, alone, 8)
    index_scores.meaning(q, weights, pages, shared, sharing, 8)
    assert (~alone.isnan()).sum(1).tolist() == [0 if length <= 8 else length for length in context]
    torch.testing.assert_close(sharing, alone, equal_nan=True)
