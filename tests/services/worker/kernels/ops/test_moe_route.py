from itertools import pairwise

import torch

from services.worker.kernels.ops.moe_route import moe_route


def test_weights_are_the_largest_probabilities() -> None:
    for dtype in moe_route.tolerances:
        for case in moe_route.cases:
            logits, top_k, renormalize = case.make(dtype)
            weights, experts = moe_route.meaning(logits, top_k, renormalize)
            assert weights.dtype == torch.float32 and experts.dtype == torch.int32
            assert weights.shape == experts.shape == (len(logits), top_k)
            for row, weight, expert in zip(logits.double(), weights.double(), experts.tolist(), strict=True):
                shares = row.exp() / row.exp().sum()
                if renormalize:
                    shares = shares / shares[expert].sum()
                torch.testing.assert_close(weight, shares[expert], rtol=3e-6, atol=1e-7)
                left = [e for e in range(len(row)) if e not in expert]
                assert all(row[e] <= row[expert[-1]] for e in left)
                for one, other in [*pairwise(expert), *((expert[-1], e) for e in left)]:
                    assert row[one] > row[other] or (row[one] == row[other] and one < other)


def test_far_logits_stay_finite() -> None:
    weights, experts = moe_route.meaning(torch.tensor([[-1e30, 1e30, 0.0, 1e30]]), 2, True)
    assert experts.tolist() == [[1, 3]] and weights.tolist() == [[0.5, 0.5]]
