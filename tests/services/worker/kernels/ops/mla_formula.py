"""Latent attention (DeepSeek-V2, arXiv 2405.04434) token by token in float64, and an op held against it."""

from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Op


def formula(q_latent: Tensor, q_rope: Tensor, pages: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    latent, rope = q_latent.shape[2], q_rope.shape[2]
    out = torch.zeros(q_latent.shape, dtype=torch.float64)
    for row, context in enumerate(rows.context_lens.tolist()):
        position = torch.arange(context)
        table = rows.block_tables[row if rows.table_rows is None else int(rows.table_rows[row])].long()
        cached = pages[table[position // rows.block_tokens], position % rows.block_tokens].double()
        latents, keys = cached[:, :latent], cached[:, latent : latent + rope]
        tokens = range(int(rows.query_starts[row]), int(rows.query_starts[row + 1]))
        for place, token in enumerate(tokens):
            seen = context - len(tokens) + place + 1
            scores = q_latent[token].double() @ latents[:seen].T + q_rope[token].double() @ keys[:seen].T
            out[token] = (scores * scale).softmax(-1) @ latents[:seen]
    return out


def check(op: Op[Any]) -> None:
    for dtype, tolerance in op.tolerances.items():
        for case in op.cases:
            arguments = case.make(dtype)
            got = op.meaning(*arguments)
            assert got.dtype == dtype and got.is_contiguous()
            wanted = formula(*arguments)
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute)
