"""The experts of a mixture with weights of four bits in groups of columns; activations stay as they are (W4A16)."""

import torch
from torch import Tensor

from services.worker.kernels.ops.int4_linear import encode_int4
from services.worker.kernels.ops.moe_gated import make_moe_case
from services.worker.kernels.ops.moe_row_scaled import add_experts
from services.worker.kernels.packing.int4 import decode_int4
from services.worker.kernels.registry import Case, Tolerance, op

WEIGHT_ONLY_MOE_TOLERANCES = {
    torch.float32: Tolerance(1e-4, 1e-4, "order of sums over hidden and inner"),
    torch.bfloat16: Tolerance(2e-2, 8e-2, "weights, gated rows and each expert's output rounded to 8 bits, or not"),
    torch.float16: Tolerance(3e-3, 1.5e-2, "weights, gated rows and each expert's output rounded to 11 bits, or not"),
}


def make_int4_moe_case(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    group: int = 128,
    asymmetric: bool = True,
) -> Case:
    dense = make_moe_case(num_tokens, num_experts, top_k, hidden, inner)

    def make(dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        x, weights, experts, gate_up, down, residual = dense.make(dtype)
        up, up_scales, up_zeros = encode_int4(gate_up, group, symmetric=not asymmetric)
        out, out_scales, out_zeros = encode_int4(down, group, symmetric=not asymmetric)
        gated = up, up_scales.to(torch.float16), up_zeros
        return x, weights, experts, *gated, out, out_scales.to(torch.float16), out_zeros, residual

    return Case(f"{dense.name}g{group}{'z' if asymmetric else ''}", make)


@op(
    cases=[
        make_int4_moe_case(1, 16, 8, 256, 128),
        make_int4_moe_case(9, 8, 2, 128, 64, group=32, asymmetric=False),
        make_int4_moe_case(33, 4, 2, 256, 128, group=64),
        make_int4_moe_case(0, 8, 2, 128, 128),
    ],
    tolerances=WEIGHT_ONLY_MOE_TOLERANCES,
    writes=("residual",),
    by_value=True,
)
def moe_int4(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    residual: Tensor,
) -> None:
    """As moe_gated, with the decoded weights. gate_up: uint8 [E, 2I, N / 2]; down: uint8 [E, N, I / 2] (packing.int4).

    gate_up_scales: [E, 2I, N / group]; down_scales: [E, N, I / group]; zeros as scales, None: 8; dtypes as in
    int4_linear. The two matrices may have unlike groups.
    """

    def part(zeros: Tensor | None, expert: int) -> Tensor | None:
        return None if zeros is None else zeros[expert]

    def pick(expert: int) -> tuple[Tensor, Tensor]:
        up = decode_int4(gate_up[expert], gate_up_scales[expert], part(gate_up_zeros, expert))
        return up, decode_int4(down[expert], down_scales[expert], part(down_zeros, expert))

    add_experts(x, weights, experts, pick, lambda values: values, residual)
