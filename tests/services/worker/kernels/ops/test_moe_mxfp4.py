from torch import Tensor

from services.worker.kernels.ops.moe_mxfp4 import moe_mxfp4
from services.worker.kernels.packing.mx import decode_mxfp4, untile_scales
from services.worker.kernels.packing.weight_tiles import untile_weight
from tests.services.worker.kernels.ops import scaled_experts


def dequantized(weight: Tensor, scales: Tensor, expert: int) -> Tensor:
    rows = untile_weight(weight[expert])
    every = untile_scales(scales, len(weight) * len(rows), rows.shape[1] // 16)
    return decode_mxfp4(rows, every[expert * len(rows) : expert * len(rows) + len(rows)]).double()


def test_is_near_the_dense_experts() -> None:
    scaled_experts.check(moe_mxfp4, dequantized, rounding=0.25)
