"""The experts of a mixture in 8 bits with a scale per row; activations in 8 bits with a scale per token (W8A8)."""

from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.kernels.ops.moe_gated import make_moe_case
from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.packing.weight_tiles import plain, tile_weight
from services.worker.kernels.registry import Case, Tolerance, op

SCALED_MOE_TOLERANCES = {
    torch.float32: Tolerance(2e-2, 3e-2, "activations between two numbers of 8 bits may go to either"),
    torch.bfloat16: Tolerance(
        2e-2, 0.16, "and are not rounded for few tokens; each expert's output is rounded to 8 bits, or not"
    ),
    torch.float16: Tolerance(
        2e-2, 0.14, "and are not rounded for few tokens; each expert's output is rounded to 11 bits, or not"
    ),
}

Pick = Callable[[int], tuple[Tensor, Tensor]]
Round = Callable[[Tensor], Tensor]


def add_experts(x: Tensor, weights: Tensor, experts: Tensor, pick: Pick, rounded: Round, residual: Tensor) -> None:
    """The sum of moe_gated, for experts in any format.

    pick(e): fp32 gate_up [2I, N] and down [N, I] of one expert; rounded: activations as the format multiplies them.
    """
    top_k, flat_weights = experts.shape[1], weights.flatten()
    total = torch.zeros(residual.shape, dtype=torch.float32, device=residual.device)
    wide = rounded(x.float()) if len(x) else x.float()
    pairs_expert = experts.flatten()
    for expert in sorted(set(pairs_expert.tolist())):
        pairs = (pairs_expert == expert).nonzero().squeeze(1)
        gate_up, down = pick(expert)
        hidden = silu_and_mul.meaning(wide.index_select(0, pairs // top_k) @ gate_up.T)
        y = rounded(hidden.to(x.dtype).float()) @ down.T
        total.index_add_(0, pairs // top_k, y * flat_weights.index_select(0, pairs)[:, None])
    residual.add_(total)


def rounded_rows(dtype: torch.dtype) -> Round:
    def rounded(x: Tensor) -> Tensor:
        numbers, scales = quantized(x, dtype)
        return numbers.float() * scales

    return rounded


def make_rows_moe_case(
    num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int, stored: torch.dtype | None = None
) -> Case:
    """`stored`: of the weights, the device's own fp8 if None."""
    dense = make_moe_case(num_tokens, num_experts, top_k, hidden, inner)

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, weights, experts, gate_up, down, residual = dense.make(dtype)
        up, up_scales = quantized(gate_up, stored or native_fp8())
        out, out_scales = quantized(down, stored or native_fp8())
        return x, weights, experts, tile_weight(up), up_scales, tile_weight(out), out_scales, residual

    return Case(dense.name + ("i8" if stored == torch.int8 else ""), make)


@op(
    cases=[
        make_rows_moe_case(1, 16, 8, 256, 128),
        make_rows_moe_case(9, 8, 2, 128, 64),
        make_rows_moe_case(33, 4, 2, 256, 128, torch.int8),
        make_rows_moe_case(0, 8, 2, 64, 32),
    ],
    tolerances=SCALED_MOE_TOLERANCES,
    writes=("residual",),
    by_value=True,
)
def moe_row_scaled(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    residual: Tensor,
) -> None:
    """As moe_gated, with the dequantized weights, x and each expert's gated row in the weights' 8 bits per token.

    gate_up, down: fp8 or int8, [E, 2I, N] and [E, N, I] or the tiles of both (packing.weight_tiles), which AITER wants;
    gate_up_scales: fp32 [E, 2I, 1]; down_scales: fp32 [E, N, 1]; the others as there.
    """

    def pick(expert: int) -> tuple[Tensor, Tensor]:
        up, out = plain(gate_up[expert]).float(), plain(down[expert]).float()
        return up * gate_up_scales[expert], out * down_scales[expert]

    add_experts(x, weights, experts, pick, rounded_rows(gate_up.dtype), residual)
