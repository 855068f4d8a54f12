import torch

from services.worker.kernels.ops.moe_route_biased import moe_route_biased


def test_the_bias_chooses_and_does_not_weigh() -> None:
    for dtype in moe_route_biased.tolerances:
        for case in moe_route_biased.cases:
            logits, bias, groups, top_groups, top_k, renormalize, scale = case.make(dtype)
            weights, experts = moe_route_biased.meaning(*case.make(dtype))
            assert weights.dtype == torch.float32 and experts.dtype == torch.int32
            size = logits.shape[1] // groups
            for row, weight, chosen in zip(logits.double(), weights.double(), experts.tolist(), strict=True):
                scores = 1 / (1 + (-row).exp())
                choice = scores + bias.double()
                parts = [
                    choice[g * size : g * size + size].sort(descending=True).values[:2].sum() for g in range(groups)
                ]
                best = sorted(range(groups), key=lambda g, s=parts: -float(s[g]))[:top_groups]
                allowed = [e for g in best for e in range(g * size, g * size + size)]
                assert chosen == sorted(allowed, key=lambda e, s=choice: -float(s[e]))[:top_k]
                shares = scores[chosen] / (scores[chosen].sum() if renormalize else 1) * scale
                torch.testing.assert_close(weight, shares, rtol=1e-5, atol=1e-6)


def test_a_bias_moves_the_choice() -> None:
    logits, bias = torch.zeros(1, 8), torch.zeros(8)
    bias[5] = 1
    _, experts = moe_route_biased.meaning(logits, bias, 2, 1, 2, False, 1.0)
    assert experts.tolist() == [[5, 4]]
