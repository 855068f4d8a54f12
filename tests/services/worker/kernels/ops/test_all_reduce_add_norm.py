import torch

from services.worker.kernels.ops.all_reduce_add_norm import all_reduce_add_norm
from services.worker.kernels.ops.rms_norm import rms_norm


def test_a_process_without_a_group_adds_its_own_and_norms() -> None:
    """What several do together is held against one in tests/services/worker/test_group.py."""
    for case in all_reduce_add_norm.cases:
        share, residual, weight, eps = case.make(torch.float32)
        total = residual + share
        normed = all_reduce_add_norm.meaning(share, residual, weight, eps)
        assert torch.equal(residual, total), case.name
        assert torch.equal(normed, rms_norm.meaning(total, weight, eps)), case.name
