from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.block_scaled_linear import (
    block_dequantized,
    block_quantized,
    block_scaled_linear,
)
from services.worker.kernels.packing.weight_tiles import untile_weight


def formula(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: Any) -> Tensor:
    """Block by block in float64."""
    rows, by_token = (weight, scales) if weight.dim() == 2 else (untile_weight(weight), scales.T)
    y = torch.zeros(len(x), len(rows), dtype=torch.float64)
    for i, strip in enumerate(rows.double().split(128)):
        for j, (block, part) in enumerate(zip(strip.split(128, -1), x.double().split(128, -1), strict=True)):
            y[:, i * 128 : i * 128 + 128] += part @ block.T * by_token[:, j : j + 1] * weight_scales[i, j]
    return y


def test_equals_formula(check: Any) -> None:
    check(block_scaled_linear, formula)


def test_blocks_have_scales_of_their_own() -> None:
    weight = torch.randn(2, 256, 384, generator=torch.Generator().manual_seed(0))
    weight[0, :128, 128:256] *= 1000
    numbers, scales = block_quantized(weight, torch.float8_e4m3fn)
    assert numbers.shape == weight.shape and scales.shape == (2, 2, 3)
    for e in range(2):
        for i in range(2):
            for j in range(3):
                block = weight[e, i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
                torch.testing.assert_close(scales[e, i, j] * 448, block.abs().amax())
    torch.testing.assert_close(block_dequantized(numbers, scales), weight, rtol=0.07, atol=1e-2)
