from torch import Tensor

from services.worker.kernels.ops.moe_tensor_scaled import moe_tensor_scaled
from services.worker.kernels.packing.weight_tiles import untile_weight
from tests.services.worker.kernels.ops import scaled_experts


def dequantized(weight: Tensor, scales: Tensor, expert: int) -> Tensor:
    return untile_weight(weight[expert]).double() * scales[expert].item()


def test_is_near_the_dense_experts() -> None:
    scaled_experts.check(moe_tensor_scaled, dequantized, rounding=0.05)
