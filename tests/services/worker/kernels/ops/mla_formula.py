"""Latent attention (DeepSeek-V2, arXiv 2405.04434) token by token in float64, and an op held against it."""

from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.registry import Op


def formula(
    q: Tensor, cache: Tensor, query_starts: Tensor, kv_starts: Tensor, kv_slots: Tensor, latent: int, scale: float
) -> Tensor:
    out = torch.zeros(*q.shape[:2], latent, dtype=torch.float64)
    for row in range(len(query_starts) - 1):
        keys = cache[kv_slots[kv_starts[row] : kv_starts[row + 1]].long()].double()
        tokens = range(int(query_starts[row]), int(query_starts[row + 1]))
        for place, token in enumerate(tokens):
            seen = keys[: len(keys) - len(tokens) + place + 1]
            out[token] = (q[token].double() @ seen.T * scale).softmax(-1) @ seen[:, :latent]
    return out


def check(op: Op[Any]) -> None:
    for dtype, tolerance in op.tolerances.items():
        for case in op.cases:
            q, cache, query_starts, kv_starts, kv_slots, max_query, latent, scale = case.make(dtype)
            got = op.meaning(q, cache, query_starts, kv_starts, kv_slots, max_query, latent, scale)
            assert got.dtype == dtype
            wanted = formula(q, cache, query_starts, kv_starts, kv_slots, latent, scale)
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute)
