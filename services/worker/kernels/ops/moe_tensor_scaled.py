"""The experts of a mixture in fp8 with one scale per matrix; activations in fp8 with one scale for all tokens."""

import torch
from torch import Tensor

from services.worker.kernels.ops.moe_gated import make_moe_case
from services.worker.kernels.ops.moe_row_scaled import SCALED_MOE_TOLERANCES, add_experts
from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.packing.weight_tiles import plain, tile_weight
from services.worker.kernels.registry import Case, op


def make_tensor_moe_case(num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int) -> Case:
    dense = make_moe_case(num_tokens, num_experts, top_k, hidden, inner)

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, weights, experts, gate_up, down, residual = dense.make(dtype)
        up, up_scales = quantized(gate_up.flatten(1), native_fp8())
        out, out_scales = quantized(down.flatten(1), native_fp8())
        tiles = tile_weight(up.view_as(gate_up)), up_scales, tile_weight(out.view_as(down)), out_scales
        return x, weights, experts, *tiles, residual

    return Case(dense.name, make)


@op(
    cases=[
        make_tensor_moe_case(1, 16, 8, 256, 128),
        make_tensor_moe_case(9, 8, 2, 128, 64),
        make_tensor_moe_case(0, 8, 2, 64, 32),
    ],
    tolerances={  # gated rows may share their scale with more rows or fewer
        dtype: limits._replace(absolute=0.25) for dtype, limits in SCALED_MOE_TOLERANCES.items()
    },
    writes=("residual",),
    by_value=True,
)
def moe_tensor_scaled(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    residual: Tensor,
) -> None:
    """As moe_row_scaled for fp8, with scales fp32 [E, 1], and activations that share one scale in a step.

    Gated rows share theirs with those of the same expert at least.
    """

    def rounded(values: Tensor) -> Tensor:
        numbers, scale = quantized(values.flatten(), gate_up.dtype)
        return (numbers.float() * scale).view_as(values)

    def pick(expert: int) -> tuple[Tensor, Tensor]:
        up, out = plain(gate_up[expert]).float(), plain(down[expert]).float()
        return up * gate_up_scales[expert], out * down_scales[expert]

    add_experts(x, weights, experts, pick, rounded, residual)
