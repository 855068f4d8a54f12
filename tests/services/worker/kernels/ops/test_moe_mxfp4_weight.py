import torch

from services.worker.kernels.ops.moe_mxfp4_weight import moe_mxfp4_weight
from tests.services.worker.kernels.ops.narrow_weights import mxfp4_by_number
from tests.services.worker.kernels.ops.scaled_experts import by_token


def test_equals_formula() -> None:
    for dtype, tolerance in moe_mxfp4_weight.tolerances.items():
        for case in moe_mxfp4_weight.cases:
            x, weights, experts, up, up_scales, up_bias, down, down_scales, down_bias, residual = case.make(dtype)
            wanted = by_token(
                (x, weights, experts, residual),
                lambda e, z=(up, up_scales): mxfp4_by_number(z[0][e], z[1][e]),
                lambda e, z=(down, down_scales): mxfp4_by_number(z[0][e], z[1][e]),
                None if up_bias is None else (up_bias, down_bias),
            )
            moe_mxfp4_weight.meaning(
                x, weights, experts, up, up_scales, up_bias, down, down_scales, down_bias, residual
            )
            assert residual.dtype == dtype
            torch.testing.assert_close(
                residual.double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute, msg=case.name
            )
