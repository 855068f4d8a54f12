"""The experts of a mixture in MXFP4 (OCP MX 1.0), activations in MXFP4 too, as gfx950's matrix cores read them."""

import torch
from torch import Tensor

from services.worker.kernels.ops.moe_gated import make_moe_case
from services.worker.kernels.ops.moe_row_scaled import add_experts
from services.worker.kernels.packing.mx import GROUP, decode_mxfp4, encode_mxfp4, tile_scales, untile_scales
from services.worker.kernels.packing.weight_tiles import matrix_shape, tile_weight, untile_weight
from services.worker.kernels.registry import Case, Tolerance, op


def make_mxfp4_moe_case(num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int) -> Case:
    dense = make_moe_case(num_tokens, num_experts, top_k, hidden, inner)

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, weights, experts, gate_up, down, residual = dense.make(dtype)
        up, up_scales = encode_mxfp4(gate_up)
        out, out_scales = encode_mxfp4(down)
        scales = tile_scales(up_scales.flatten(0, 1)), tile_scales(out_scales.flatten(0, 1))
        return x, weights, experts, tile_weight(up), scales[0], tile_weight(out), scales[1], residual

    return Case(dense.name, make)


@op(
    cases=[
        make_mxfp4_moe_case(1, 16, 8, 256, 256),
        make_mxfp4_moe_case(17, 4, 2, 512, 256),
        make_mxfp4_moe_case(0, 4, 2, 256, 256),
    ],
    tolerances={
        dtype: Tolerance(5e-2, 0.4, "a gated number between two of 4 bits may go to either, and be a third larger")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
    writes=("residual",),
    by_value=True,
)
def moe_mxfp4(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    residual: Tensor,
) -> None:
    """As moe_gated, with the decoded weights, x and each expert's gated row rounded to MXFP4 (or finer).

    gate_up, down: uint8, the tiles (packing.weight_tiles) of [E, 2I, N / 2] and [E, N, I / 2]; their scales: uint8, the
    tiles (packing.mx.tile_scales) of [E * 2I, N / 32] and [E * N, I / 32]. N and I are multiples of 256.
    """
    hidden, inner = x.shape[1], matrix_shape(gate_up)[1] // 2
    up_scales = untile_scales(gate_up_scales, len(gate_up) * 2 * inner, hidden // GROUP).view(
        -1, 2 * inner, hidden // GROUP
    )
    out_scales = untile_scales(down_scales, len(down) * hidden, inner // GROUP).view(-1, hidden, inner // GROUP)

    def pick(expert: int) -> tuple[Tensor, Tensor]:
        up = decode_mxfp4(untile_weight(gate_up[expert]), up_scales[expert])
        return up, decode_mxfp4(untile_weight(down[expert]), out_scales[expert])

    def rounded(values: Tensor) -> Tensor:
        return decode_mxfp4(*encode_mxfp4(values))

    add_experts(x, weights, experts, pick, rounded, residual)
