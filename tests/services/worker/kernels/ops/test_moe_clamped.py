import pytest
import torch

from services.worker.kernels.ops.moe_clamped import clamped_swiglu, moe_clamped


def test_adds_the_weighted_experts_with_their_biases() -> None:
    for dtype, tolerance in moe_clamped.tolerances.items():
        for case in moe_clamped.cases:
            x, weights, experts, gate_up, up_bias, down, down_bias, residual = case.make(dtype)
            wanted = residual.double()
            for t, (row, chosen) in enumerate(zip(x.double(), experts.tolist(), strict=True)):
                for weight, e in zip(weights[t].double(), chosen, strict=True):
                    gate, up = (gate_up[e].double() @ row + up_bias[e].double()).chunk(2)
                    gate = gate.clamp(max=7)
                    gated = gate / (1 + (-1.702 * gate).exp()) * (up.clamp(-7, 7) + 1)
                    wanted[t] += weight * (down[e].double() @ gated + down_bias[e].double())
            moe_clamped.meaning(x, weights, experts, gate_up, up_bias, down, down_bias, residual)
            torch.testing.assert_close(
                residual.double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute, msg=case.name
            )


def test_the_gate_is_bounded_above_and_up_on_both_sides() -> None:
    (gated,) = clamped_swiglu(torch.tensor([[100.0, 7.0, -100.0, 1.0, 1.0, 2.0, 7.0, 5.0, 50.0, -50.0]])).tolist()
    assert gated[0] == pytest.approx(gated[1] * 3 / 8) and abs(gated[2]) < 1e-6
    assert gated[3] == pytest.approx(gated[4] * -8 / 6)
