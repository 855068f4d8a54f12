import torch
from torch import Tensor

from services.worker.kernels.ops.mla_decode import mla_decode


def formula(
    q: Tensor, cache: Tensor, query_starts: Tensor, kv_starts: Tensor, kv_slots: Tensor, latent: int, scale: float
) -> Tensor:
    """Token by token in float64."""
    out = torch.zeros(*q.shape[:2], latent, dtype=torch.float64)
    for row in range(len(query_starts) - 1):
        keys = cache[kv_slots[kv_starts[row] : kv_starts[row + 1]].long()].double()
        tokens = range(int(query_starts[row]), int(query_starts[row + 1]))
        for place, token in enumerate(tokens):
            seen = keys[: len(keys) - len(tokens) + place + 1]
            out[token] = (q[token].double() @ seen.T * scale).softmax(-1) @ seen[:, :latent]
    return out


def test_equals_formula() -> None:
    for dtype, tolerance in mla_decode.tolerances.items():
        for case in mla_decode.cases:
            q, cache, query_starts, kv_starts, kv_slots, max_query, latent, scale = case.make(dtype)
            got = mla_decode.meaning(q, cache, query_starts, kv_starts, kv_slots, max_query, latent, scale)
            assert got.dtype == dtype
            wanted = formula(q, cache, query_starts, kv_starts, kv_slots, latent, scale)
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute)


def test_slots_beyond_the_last_row_are_not_read() -> None:
    """A step that is replayed has room for the longest contexts."""
    q, cache, query_starts, kv_starts, kv_slots, *rest = mla_decode.cases[0].make(torch.float32)
    wanted = mla_decode.meaning(q, cache, query_starts, kv_starts, kv_slots, *rest)
    longer = torch.cat((kv_slots, kv_slots[:9]))
    torch.testing.assert_close(mla_decode.meaning(q, cache, query_starts, kv_starts, longer, *rest), wanted)
