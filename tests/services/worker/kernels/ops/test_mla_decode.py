import torch

from services.worker.kernels.ops.mla_decode import mla_decode
from tests.services.worker.kernels.ops import mla_formula


def test_equals_formula() -> None:
    mla_formula.check(mla_decode)


def test_slots_beyond_the_last_row_are_not_read() -> None:
    """A step that is replayed has room for the longest contexts."""
    q, cache, query_starts, kv_starts, kv_slots, *rest = mla_decode.cases[0].make(torch.float32)
    wanted = mla_decode.meaning(q, cache, query_starts, kv_starts, kv_slots, *rest)
    longer = torch.cat((kv_slots, kv_slots[:9]))
    torch.testing.assert_close(mla_decode.meaning(q, cache, query_starts, kv_starts, longer, *rest), wanted)
