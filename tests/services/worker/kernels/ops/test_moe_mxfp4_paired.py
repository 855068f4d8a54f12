import torch

from services.worker.kernels.ops.moe_mxfp4_paired import moe_mxfp4_paired, paired, unpaired
from services.worker.kernels.ops.moe_mxfp4_weight import moe_mxfp4_weight


def test_gate_and_up_rows_in_turn() -> None:
    rows = torch.tensor([[10, 11, 12, 20, 21, 22]])
    assert paired(rows).tolist() == [[10, 20, 11, 21, 12, 22]]
    stack = torch.randn(3, 8, 5)
    assert torch.equal(unpaired(paired(stack)), stack) and paired(stack).is_contiguous()


def test_is_what_moe_mxfp4_weight_is() -> None:
    for here, there in zip(moe_mxfp4_paired.cases, moe_mxfp4_weight.cases, strict=True):
        ours, theirs = here.make(torch.float32), there.make(torch.float32)
        before = theirs[-1].clone()
        moe_mxfp4_paired.meaning(*ours)
        moe_mxfp4_weight.meaning(*theirs)
        assert torch.equal(ours[-1], theirs[-1]) and (not len(before) or not torch.equal(before, theirs[-1]))
