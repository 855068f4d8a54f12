"""The experts of a mixture in MXFP8 (OCP MX 1.0), activations in MXFP8 too."""

import torch
from torch import Tensor

from services.worker.kernels.ops.moe_gated import make_moe_case
from services.worker.kernels.ops.moe_row_scaled import SCALED_MOE_TOLERANCES, add_experts
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.packing.mx import decode_mxfp8, encode_mxfp8
from services.worker.kernels.registry import Case, op


def make_mxfp8_moe_case(num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int) -> Case:
    dense = make_moe_case(num_tokens, num_experts, top_k, hidden, inner)

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, weights, experts, gate_up, down, residual = dense.make(dtype)
        gated, out = encode_mxfp8(gate_up, native_fp8()), encode_mxfp8(down, native_fp8())
        return x, weights, experts, *gated, *out, residual

    return Case(dense.name, make)


@op(
    cases=[
        make_mxfp8_moe_case(1, 16, 8, 256, 128),
        make_mxfp8_moe_case(17, 4, 2, 96, 64),
        make_mxfp8_moe_case(0, 4, 2, 64, 32),
    ],
    tolerances=SCALED_MOE_TOLERANCES,
    writes=("residual",),
    by_value=True,
)
def moe_mxfp8(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    residual: Tensor,
) -> None:
    """As moe_gated, with the decoded weights, x and each expert's gated row rounded to MXFP8.

    gate_up, down: fp8 [E, 2I, N] and [E, N, I]; their scales: uint8 [E, 2I, N / 32] and [E, N, I / 32]; no tiles.
    """

    def pick(expert: int) -> tuple[Tensor, Tensor]:
        up = decode_mxfp8(gate_up[expert], gate_up_scales[expert])
        return up, decode_mxfp8(down[expert], down_scales[expert])

    def rounded(values: Tensor) -> Tensor:
        return decode_mxfp8(*encode_mxfp8(values, gate_up.dtype))

    add_experts(x, weights, experts, pick, rounded, residual)
