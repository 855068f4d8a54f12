"""The experts of a mixture in fp8 with a scale per block of 128 by 128; activations one per token and 128 columns."""

import torch
from torch import Tensor

from services.worker.kernels.ops.block_scaled_linear import BLOCK, block_dequantized, block_quantized
from services.worker.kernels.ops.moe_gated import make_moe_case
from services.worker.kernels.ops.moe_row_scaled import SCALED_MOE_TOLERANCES, add_experts, rounded_rows
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.packing.mx import grouped
from services.worker.kernels.packing.weight_tiles import plain, tile_weight
from services.worker.kernels.registry import Case, op


def make_block_moe_case(num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int) -> Case:
    dense = make_moe_case(num_tokens, num_experts, top_k, hidden, inner)

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, weights, experts, gate_up, down, residual = dense.make(dtype)
        up, up_scales = block_quantized(gate_up, native_fp8())
        out, out_scales = block_quantized(down, native_fp8())
        return x, weights, experts, tile_weight(up), up_scales, tile_weight(out), out_scales, residual

    return Case(dense.name, make)


@op(
    cases=[
        make_block_moe_case(1, 16, 8, 256, 128),
        make_block_moe_case(17, 4, 2, 512, 256),
        make_block_moe_case(0, 4, 2, 128, 128),
    ],
    tolerances=SCALED_MOE_TOLERANCES,
    writes=("residual",),
    by_value=True,
)
def moe_block_scaled(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    residual: Tensor,
) -> None:
    """As moe_row_scaled for fp8, with scales fp32 [E, 2I / 128, N / 128] and [E, N / 128, I / 128].

    Activations have a scale per token and 128 columns. N and I are multiples of 128.
    """
    by_row = rounded_rows(gate_up.dtype)

    def rounded(values: Tensor) -> Tensor:
        return by_row(grouped(values, BLOCK)).flatten(-2)

    def pick(expert: int) -> tuple[Tensor, Tensor]:
        up = block_dequantized(plain(gate_up[expert]), gate_up_scales[expert])
        return up, block_dequantized(plain(down[expert]), down_scales[expert])

    add_experts(x, weights, experts, pick, rounded, residual)
