import torch

from services.worker.kernels.ops.moe_int4 import moe_int4
from services.worker.kernels.ops.moe_int4_whole import moe_int4_whole, pack_rows, unpack_rows


def test_two_rows_to_a_byte() -> None:
    zeros = torch.tensor([[[1, 2], [3, 15], [0, 7], [9, 8]]], dtype=torch.uint8)
    assert pack_rows(zeros).tolist() == [[[0x31, 0xF2], [0x90, 0x87]]]
    assert torch.equal(unpack_rows(pack_rows(zeros)), zeros)


def test_is_what_moe_int4_is() -> None:
    for here, there in zip(moe_int4_whole.cases, moe_int4.cases, strict=True):
        ours, theirs = here.make(torch.float32), there.make(torch.float32)
        before = theirs[-1].clone()
        moe_int4_whole.meaning(*ours)
        moe_int4.meaning(*theirs)
        assert torch.equal(ours[-1], theirs[-1]) and (not len(before) or not torch.equal(before, theirs[-1]))
