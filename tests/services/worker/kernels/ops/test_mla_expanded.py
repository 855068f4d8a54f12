"""The meaning token by token, and that it is the absorbed one on projected latents."""

from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.mla_decode import mla_decode
from services.worker.kernels.ops.mla_expanded import mla_expanded
from services.worker.kernels.ops.paged_attention import make_attention_rows


def formula(
    q: Tensor, kv: Tensor, k_rope: Tensor, query_starts: Tensor, kv_starts: Tensor, max_query: int, scale: float
) -> Tensor:
    nope = q.shape[2] - k_rope.shape[1]
    out = torch.zeros(*q.shape[:2], kv.shape[2] - nope, dtype=torch.float64)
    for row in range(len(query_starts) - 1):
        begin, end = int(kv_starts[row]), int(kv_starts[row + 1])
        first, last = int(query_starts[row]), int(query_starts[row + 1])
        for token in range(first, last):
            seen = slice(begin, end - (last - 1 - token))
            for head in range(q.shape[1]):
                keys = torch.cat((kv[seen, head, :nope], k_rope[seen]), 1)
                out[token, head] = (keys @ q[token, head] * scale).softmax(0) @ kv[seen, head, nope:]
    return out


def test_equals_formula(check: Any) -> None:
    check(mla_expanded, formula)


def test_is_the_absorbed_form_of_the_same_model() -> None:
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads, nope, rope, value, latent, tokens, context = 3, 6, 4, 5, 8, 7, 20
    up, pages, q = random(heads, nope + value, latent), random(5, 4, latent + rope), random(tokens, heads, nope + rope)
    table = [3, 0, 4, 1, 2]
    cached = pages[table].flatten(0, 1)[:context]
    kv = torch.einsum("sl,hdl->shd", cached[:, :latent], up)
    starts = torch.tensor([0, tokens]), torch.tensor([0, context])
    expanded = mla_expanded.meaning(q, kv, cached[:, latent:], *starts, tokens, 0.3)
    rows = make_attention_rows([tokens], [context], [table], 4)
    absorbed = torch.einsum("thd,hdl->thl", q[..., :nope], up[:, :nope])
    results = mla_decode.meaning(absorbed, q[..., nope:], pages, rows, 0.3)
    torch.testing.assert_close(torch.einsum("thl,hdl->thd", results, up[:, nope:]), expanded)
