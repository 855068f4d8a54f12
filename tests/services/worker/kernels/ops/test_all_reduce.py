import torch

from services.worker.kernels.ops.all_reduce import all_reduce


def test_a_process_without_a_group_is_a_group_of_one() -> None:
    """What several do together is held against one in tests/services/worker/test_group.py."""
    for case in all_reduce.cases:
        (x,) = case.make(torch.float32)
        before = x.clone()
        all_reduce.meaning(x)
        assert torch.equal(x, before), case.name
