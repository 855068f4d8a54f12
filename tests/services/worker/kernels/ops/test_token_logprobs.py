import torch

from services.worker.kernels.ops.token_logprobs import token_logprobs


def test_values_ids_and_ranks_are_those_of_a_sorted_log_softmax() -> None:
    for case in token_logprobs.cases:
        logits, tokens, top = case.make(torch.float32)
        values, ids, ranks = token_logprobs.meaning(logits, tokens, top)
        assert values.shape == ids.shape == (len(logits), 1 + top) and values.dtype == torch.float32, case.name
        for row, token in enumerate(tokens.tolist()):
            by_id = logits[row].log_softmax(-1)
            order = sorted(range(len(by_id)), key=lambda each: (-logits[row, each].item(), each))
            missing = [-1] * max(top - len(order), 0)
            assert ids[row].tolist() == [token, *order[:top], *missing], case.name
            found = [place for place in ids[row].tolist() if place >= 0]
            assert torch.allclose(values[row, : len(found)], by_id[found], atol=1e-5), case.name
            assert ranks[row] == 1 + order.index(token), case.name


def test_barred_tokens_and_zeros_of_both_signs() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -0.0, -torch.inf]])
    values, ids, ranks = token_logprobs.meaning(logits, torch.tensor([2], dtype=torch.int32), 4)
    assert ids.tolist() == [[2, 1, 2, 0, 3]] and ranks.tolist() == [2]
    half = -torch.tensor(2.0).log().item()
    assert torch.allclose(values[0, :3], torch.full((3,), half)) and values[0, 3:].isinf().all()
