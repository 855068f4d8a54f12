import torch

from services.worker.kernels.ops.norm_route import norm_route


def test_is_norm_product_and_the_largest_shares() -> None:
    for dtype, tolerance in norm_route.tolerances.items():
        for case in norm_route.cases:
            x, norm, eps, router, bias, top_k, renormalize = case.make(dtype)
            normed, weights, experts = norm_route.meaning(x, norm, eps, router, bias, top_k, renormalize)
            offset = 0.0 if bias is None else bias.double()
            wide = x.double()
            wanted = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
            torch.testing.assert_close(normed.double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute)
            assert normed.dtype == dtype and weights.dtype == torch.float32 and experts.dtype == torch.int32
            shares = (normed.double() @ router.double().T + offset).softmax(-1)
            chosen = shares.topk(top_k)
            assert torch.equal(experts.long(), chosen.indices)
            scale = chosen.values.sum(-1, keepdim=True) if renormalize else 1.0
            torch.testing.assert_close(weights.double(), chosen.values / scale, rtol=1e-5, atol=1e-6)


def test_cases_leave_no_doubt_about_the_choice() -> None:
    for dtype in norm_route.tolerances:
        for case in norm_route.cases:
            x, norm, eps, router, bias, top_k, renormalize = case.make(dtype)
            normed = norm_route.meaning(x, norm, eps, router, bias, top_k, renormalize)[0]
            logits = normed.double() @ router.double().T + (0.0 if bias is None else bias.double())
            ordered = logits.sort(dim=-1, descending=True).values[:, : top_k + 1]
            assert ((ordered[:, :-1] - ordered[:, 1:]) > 2e-3).all(), case.name
