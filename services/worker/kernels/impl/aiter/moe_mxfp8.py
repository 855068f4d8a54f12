"""Experts in MXFP8, activations too, by AITER's Triton kernels; gfx950 alone multiplies such numbers."""

from functools import partial

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._gate import SILU, gated
from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.impl.aiter._sorted import SORT, add_weighted, logits_of
from services.worker.kernels.ops.moe_mxfp8 import moe_mxfp8
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Facts, Impl

ROUND = Function("aiter.ops.triton.moe.quant_moe:downcast_to_mxfp", needs=("src_tensor", "out_quant_type", "axis"))
MM = Function(
    "aiter.ops.triton.moe.moe_op_gemm_a8w8:moe_gemm_a8w8",
    needs=("x", "w", "x_scales", "w_scales", "routing_data", "gather_indx", "scatter_indx", "gammas", "out_dtype"),
)


def fused(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    residual: Tensor,
) -> None:
    if not len(x):
        return
    routing, gather, scatter = SORT(logits=logits_of(weights, experts, len(down)), n_expts_act=experts.shape[1])

    def product(values: Tensor, weight: Tensor, scales: Tensor, last: bool) -> Tensor:
        numbers, exponents = ROUND(src_tensor=values, out_quant_type=weight.dtype, axis=-1)
        result: Tensor = MM(
            x=numbers,
            w=weight.transpose(1, 2),
            x_scales=exponents,
            w_scales=scales.transpose(1, 2),
            routing_data=routing,
            gather_indx=None if last else gather,
            scatter_indx=scatter if last else None,
            gammas=routing.gate_scal if last else None,
            out_dtype=values.dtype,
        )
        return result

    gate = silu_and_mul.meaning if SILU.missing() else partial(gated, activation="silu")
    up = product(x, gate_up, gate_up_scales, last=False)
    add_weighted(residual, product(gate(up).contiguous(), down, down_scales, last=True), weights)


def refuses(facts: Facts) -> str | None:
    if facts.arch != "gfx950":
        return "MXFP8 needs gfx950"
    return refusal(facts, SORT, ROUND, MM, dtypes=(torch.bfloat16,))


IMPL = Impl(moe_mxfp8, "aiter", fused, refuses)
