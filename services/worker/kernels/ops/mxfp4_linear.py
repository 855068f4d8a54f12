"""Matrix product of MXFP4 activations with an MXFP4 weight (OCP MX 1.0), both as gfx950's matrix cores read them."""

import torch
from torch import Tensor

from services.worker.kernels.ops.row_scaled_linear import SCALED_TOLERANCES, make_operands
from services.worker.kernels.packing.mx import GROUP, decode_mxfp4, encode_mxfp4, tile_scales, untile_scales
from services.worker.kernels.packing.weight_tiles import tile_weight, untile_weight
from services.worker.kernels.registry import Case, op


def make_mxfp4_linear_case(num_tokens: int, in_features: int, out_features: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.dtype]:
        x, weight, _ = make_operands(num_tokens, in_features, out_features)
        packed, scales = encode_mxfp4(x)
        rows, row_scales = encode_mxfp4(weight)
        return packed, tile_scales(scales), tile_weight(rows), tile_scales(row_scales), dtype

    return Case(f"{num_tokens}x{in_features}x{out_features}", make)


@op(
    cases=[
        make_mxfp4_linear_case(1, 512, 960),
        make_mxfp4_linear_case(37, 256, 64),
        make_mxfp4_linear_case(256, 1024, 32),
        make_mxfp4_linear_case(0, 128, 32),
    ],
    tolerances=SCALED_TOLERANCES,
)
def mxfp4_linear(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of the decoded x and weight, summed in fp32; returns a new [T, out] of `dtype`.

    x: uint8 [T, in / 2]; weight: uint8 tiles of [out, in / 2] (packing.weight_tiles); scales, weight_scales: uint8
    tiles of [T, in / 32] and [out, in / 32] (packing.mx.tile_scales).
    """
    rows = untile_weight(weight)
    columns = rows.shape[1] * 2 // GROUP
    wide = decode_mxfp4(x, untile_scales(scales, len(x), columns))
    return (wide @ decode_mxfp4(rows, untile_scales(weight_scales, len(rows), columns)).T).to(dtype)
