import torch

from services.worker.kernels.ops.all_gather import all_gather


def test_a_process_without_a_group_is_a_group_of_one() -> None:
    """What several do together is held against one in tests/services/worker/test_group.py."""
    for case in all_gather.cases:
        x, gathered = case.make(torch.bfloat16)
        all_gather.meaning(x, gathered)
        assert torch.equal(gathered, x), case.name
