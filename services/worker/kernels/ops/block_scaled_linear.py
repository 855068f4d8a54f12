"""Matrix product of fp8 numbers whose weight has a scale per block of 128 by 128, and x one per token and 128."""

import torch
from torch import Tensor

from services.worker.kernels.ops.quantize_groups import by_group
from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.kernels.ops.row_scaled_linear import SCALED_TOLERANCES, make_operands
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.packing.weight_tiles import plain, tile_weight
from services.worker.kernels.registry import Case, op

BLOCK = 128


def block_quantized(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., N, K], N and K multiples of 128, as `dtype` and fp32 scales [..., N / 128, K / 128]."""
    *lead, rows, columns = weight.shape
    blocks = weight.reshape(*lead, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).transpose(-2, -3)
    numbers, scales = quantized(blocks.flatten(-2), dtype)
    return numbers.view(blocks.shape).transpose(-2, -3).reshape(weight.shape), scales.squeeze(-1)


def block_dequantized(weight: Tensor, scales: Tensor) -> Tensor:
    """The fp32 matrices that block_quantized's results stand for."""
    wide = scales.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
    return weight.float() * wide


def make_block_case(num_tokens: int, in_features: int, out_features: int, tiled: bool) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.dtype]:
        x, weight, _ = make_operands(num_tokens, in_features, out_features)
        numbers, scales = by_group(x, native_fp8(), BLOCK, by_column=tiled)
        blocks, weight_scales = block_quantized(weight, native_fp8())
        return numbers, scales, tile_weight(blocks) if tiled else blocks, weight_scales, dtype

    return Case(f"{num_tokens}x{in_features}x{out_features}{'t' if tiled else ''}", make)


@op(
    cases=[
        make_block_case(1, 512, 256, tiled=True),
        make_block_case(1, 512, 256, tiled=False),
        make_block_case(128, 128, 384, tiled=True),
        make_block_case(33, 256, 128, tiled=False),
        make_block_case(0, 128, 128, tiled=True),
    ],
    tolerances=SCALED_TOLERANCES,
)
def block_scaled_linear(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of the dequantized x and weight, summed in fp32; returns a new [T, out] of `dtype`.

    x: fp8 [T, in]; weight: fp8 [out, in] with scales fp32 [T, in / 128], or its tiles with scales [in / 128, T] (as
    quantize_groups gives them by column); weight_scales: fp32 [out / 128, in / 128]. in, out: multiples of 128.
    """
    by_token = scales if weight.dim() == 2 else scales.T
    wide = x.float() * by_token.repeat_interleave(BLOCK, -1)
    return (wide @ block_dequantized(plain(weight), weight_scales).T).to(dtype)
