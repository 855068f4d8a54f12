import torch

from services.worker.kernels.impl.aiter._sorted import add_weighted, logits_of


def test_an_expert_of_no_weight_is_still_the_one_that_was_chosen() -> None:
    logits = logits_of(torch.tensor([[1.0, 0.0]]), torch.tensor([[5, 2]], dtype=torch.int32), 8)
    assert logits.topk(2).indices.tolist() == [[5, 2]] and logits.dtype == torch.float32
    torch.testing.assert_close(logits.softmax(1)[0], torch.eye(8)[5])


def test_weights_that_do_not_sum_to_one() -> None:
    residual = torch.ones(2, 3)
    add_weighted(residual, torch.full((2, 3), 2.0), torch.tensor([[0.5, 0.5], [1.0, 1.5]]))
    assert residual.tolist() == [[3.0] * 3, [6.0] * 3]
