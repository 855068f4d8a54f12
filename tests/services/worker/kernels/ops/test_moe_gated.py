import torch

from services.worker.kernels.ops.moe_gated import moe_gated


def test_adds_the_weighted_experts_in_place() -> None:
    for dtype, tolerance in moe_gated.tolerances.items():
        for case in moe_gated.cases:
            x, weights, experts, gate_up, down, residual = case.make(dtype)
            wanted = residual.double()
            for t, (row, chosen) in enumerate(zip(x.double(), experts.tolist(), strict=True)):
                for weight, expert in zip(weights[t].double(), chosen, strict=True):
                    gate, up = (gate_up[expert].double() @ row).chunk(2)
                    wanted[t] += weight * (down[expert].double() @ (gate / (1 + (-gate).exp()) * up))
            assert moe_gated.meaning(x, weights, experts, gate_up, down, residual) is None
            assert residual.dtype == dtype
            torch.testing.assert_close(
                residual.double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute, msg=case.name
            )
