import torch

from services.worker.kernels.ops.moe_route_grouped import best_experts, moe_route_grouped, scaled_weights


def test_the_best_of_the_best_groups() -> None:
    for dtype in moe_route_grouped.tolerances:
        for case in moe_route_grouped.cases:
            logits, groups, top_groups, top_k, renormalize, softmax, scale = case.make(dtype)
            weights, experts = moe_route_grouped.meaning(*case.make(dtype))
            assert weights.dtype == torch.float32 and experts.dtype == torch.int32
            assert weights.shape == experts.shape == (len(logits), top_k)
            size = logits.shape[1] // groups
            for row, weight, chosen in zip(logits.double(), weights.double(), experts.tolist(), strict=True):
                scores = row.exp() / row.exp().sum() if softmax else 1 / (1 + (-row).exp())
                by_group = sorted(range(groups), key=lambda g, s=scores: -float(s[g * size : g * size + size].max()))
                allowed = [e for g in by_group[:top_groups] for e in range(g * size, g * size + size)]
                wanted = sorted(allowed, key=lambda e, s=scores: -float(s[e]))[:top_k]
                assert chosen == wanted
                shares = scores[wanted] / (scores[wanted].sum() if renormalize else 1) * scale
                torch.testing.assert_close(weight, shares, rtol=1e-5, atol=1e-6)


def test_of_equals_the_lower() -> None:
    choice = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 0.0, 2.0, 2.0]])
    group_scores = choice.unflatten(-1, (4, 2)).amax(-1)
    assert best_experts(choice, group_scores, 2, 3).tolist() == [[1, 2, 0]]


def test_closed_groups_stay_closed_below_zero() -> None:
    """Scores may be negative with a bias: what is masked must not win against them."""
    choice = torch.tensor([[-3.0, -4.0, -1.0, -2.0]])
    assert best_experts(choice, torch.tensor([[0.0, 1.0]]), 1, 2).tolist() == [[2, 3]]


def test_scale_comes_after_the_sum() -> None:
    weights, _ = scaled_weights(torch.tensor([[0.1, 0.3]]), torch.tensor([[1, 0]]), True, 2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.5, 0.5]]))
