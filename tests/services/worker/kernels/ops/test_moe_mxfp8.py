from torch import Tensor

from services.worker.kernels.ops.moe_mxfp8 import moe_mxfp8
from tests.services.worker.kernels.ops import scaled_experts
from tests.services.worker.kernels.ops.narrow_weights import mxfp8_by_number


def dequantized(weight: Tensor, scales: Tensor, expert: int) -> Tensor:
    return mxfp8_by_number(weight[expert], scales[expert])


def test_is_near_the_dense_experts() -> None:
    scaled_experts.check(moe_mxfp8, dequantized, rounding=0.06)
