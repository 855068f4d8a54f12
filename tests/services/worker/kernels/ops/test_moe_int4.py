import torch
from torch import Tensor

from services.worker.kernels.ops.moe_int4 import moe_int4
from tests.services.worker.kernels.ops.narrow_weights import int4_by_number
from tests.services.worker.kernels.ops.scaled_experts import by_token


def test_equals_formula() -> None:
    for dtype, tolerance in moe_int4.tolerances.items():
        for case in moe_int4.cases:
            x, weights, experts, *stacks, residual = case.make(dtype)
            up, up_scales, up_zeros, down, down_scales, down_zeros = stacks

            def one(stack: Tensor, scales: Tensor, zeros: Tensor | None, expert: int) -> Tensor:
                return int4_by_number(stack[expert], scales[expert], None if zeros is None else zeros[expert])

            wanted = by_token(
                (x, weights, experts, residual),
                lambda e, z=(up, up_scales, up_zeros): one(*z, e),
                lambda e, z=(down, down_scales, down_zeros): one(*z, e),
            )
            moe_int4.meaning(x, weights, experts, *stacks, residual)
            assert residual.dtype == dtype
            torch.testing.assert_close(
                residual.double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute, msg=case.name
            )
