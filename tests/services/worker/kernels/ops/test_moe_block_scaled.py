from torch import Tensor

from services.worker.kernels.ops.moe_block_scaled import moe_block_scaled
from services.worker.kernels.packing.weight_tiles import untile_weight
from tests.services.worker.kernels.ops import scaled_experts


def dequantized(weight: Tensor, scales: Tensor, expert: int) -> Tensor:
    rows = untile_weight(weight[expert]).double()
    for i in range(len(rows) // 128):
        for j in range(rows.shape[1] // 128):
            rows[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] *= scales[expert, i, j].item()
    return rows


def test_is_near_the_dense_experts() -> None:
    scaled_experts.check(moe_block_scaled, dequantized, rounding=0.05)
