"""The experts of a mixture with MXFP4 weights where activations stay as they are (W4A16), also those of gpt-oss."""

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.moe_clamped import clamped_swiglu, make_clamped_case
from services.worker.kernels.ops.moe_gated import add_pairs, make_moe_case
from services.worker.kernels.ops.moe_int4 import WEIGHT_ONLY_MOE_TOLERANCES
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.packing.mx import decode_mxfp4, encode_mxfp4
from services.worker.kernels.registry import Case, op


def make_mxfp4_weight_moe_case(
    num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int, biased: bool = False
) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        if biased:
            dense = make_clamped_case(num_tokens, num_experts, top_k, hidden, inner)
            x, weights, experts, gate_up, up_bias, down, down_bias, residual = dense.make(dtype)
        else:
            x, weights, experts, gate_up, down, residual = make_moe_case(
                num_tokens, num_experts, top_k, hidden, inner
            ).make(dtype)
            up_bias, down_bias = None, None
        return x, weights, experts, *encode_mxfp4(gate_up), up_bias, *encode_mxfp4(down), down_bias, residual

    return Case(f"{num_tokens}x{num_experts}k{top_k}x{hidden}x{inner}{'b' if biased else ''}", make)


@op(
    cases=[
        make_mxfp4_weight_moe_case(1, 16, 4, 96, 32, biased=True),
        make_mxfp4_weight_moe_case(1, 16, 8, 256, 128),
        make_mxfp4_weight_moe_case(9, 8, 2, 128, 64),
        make_mxfp4_weight_moe_case(33, 4, 2, 64, 96, biased=True),
        make_mxfp4_weight_moe_case(0, 8, 2, 64, 32),
    ],
    tolerances={  # biases make gated numbers a few times as large
        dtype: limit._replace(relative=2 * limit.relative, absolute=4 * limit.absolute)
        for dtype, limit in WEIGHT_ONLY_MOE_TOLERANCES.items()
    },
    writes=("residual",),
    by_value=True,
)
def moe_mxfp4_weight(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_bias: Tensor | None,
    residual: Tensor,
) -> None:
    """As moe_clamped where there are biases, else as moe_gated, with the decoded weights; sums are in fp32.

    gate_up, down: uint8 [E, 2I, N / 2] and [E, N, I / 2]; their scales: uint8 [E, 2I, N / 32] and [E, N, I / 32], all
    as packing.mx.encode_mxfp4 gives them; gate_up_bias: [E, 2I], gate first; down_bias: [E, N]; of x's dtype.
    """

    def bias_of(biases: Tensor | None, expert: int) -> Tensor | None:
        return None if biases is None else biases[expert].float()

    def mlp(expert: int, rows: Tensor) -> Tensor:
        up, out = (
            decode_mxfp4(gate_up[expert], gate_up_scales[expert]),
            decode_mxfp4(down[expert], down_scales[expert]),
        )
        hidden = functional.linear(rows.float(), up, bias_of(gate_up_bias, expert))
        gated = silu_and_mul.meaning(hidden) if gate_up_bias is None else clamped_swiglu(hidden)
        return functional.linear(gated.to(x.dtype).float(), out, bias_of(down_bias, expert))

    add_pairs(x, weights, experts, len(down), mlp, residual)
