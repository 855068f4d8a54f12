from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.mxfp4_linear import mxfp4_linear
from services.worker.kernels.packing.mx import VALUES, untile_scales
from services.worker.kernels.packing.weight_tiles import untile_weight


def decoded(packed: Tensor, tiles: Tensor) -> Tensor:
    """Number by number in float64."""
    rows = torch.zeros(len(packed), packed.shape[1] * 2, dtype=torch.float64)
    scales = untile_scales(tiles, len(packed), rows.shape[1] // 32)
    for column in range(rows.shape[1]):
        codes = packed[:, column // 2] >> 4 * (column % 2) & 15
        values = torch.tensor(VALUES, dtype=torch.float64)[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
        rows[:, column] = values * 2.0 ** (scales[:, column // 32].double() - 127)
    return rows


def formula(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: Any) -> Tensor:
    return decoded(x, scales) @ decoded(untile_weight(weight), weight_scales).T


def test_equals_formula(check: Any) -> None:
    check(mxfp4_linear, formula)
