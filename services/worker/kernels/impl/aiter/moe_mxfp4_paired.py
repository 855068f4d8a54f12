"""Experts with MXFP4 weights and 16-bit activations by AITER's Triton kernels, which sort, multiply and gate."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.impl.aiter._sorted import SORT, add_weighted, logits_of
from services.worker.kernels.ops.moe_clamped import LIMIT, SLOPE
from services.worker.kernels.ops.moe_mxfp4_paired import moe_mxfp4_paired
from services.worker.kernels.registry import Facts, Impl

MM = Function(
    "aiter.ops.triton.moe.moe_op_gemm_a16w4:moe_gemm_a16w4",
    needs=(
        *("x", "w", "x_scales", "w_scales", "bias", "routing_data", "gather_indx", "scatter_indx", "gammas"),
        *("out_dtype", "apply_swiglu", "alpha", "limit", "swiglu_add_residual"),
    ),
)


def fused(
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
    if not len(x):
        return
    routing, gather, scatter = SORT(logits=logits_of(weights, experts, len(down)), n_expts_act=experts.shape[1])
    clamped = gate_up_bias is not None
    gated = MM(
        x=x,
        w=gate_up.transpose(1, 2),
        x_scales=None,
        w_scales=gate_up_scales.transpose(1, 2),
        bias=gate_up_bias,
        routing_data=routing,
        gather_indx=gather,
        scatter_indx=None,
        gammas=None,
        out_dtype=x.dtype,
        apply_swiglu=True,
        alpha=SLOPE if clamped else 1.0,
        limit=LIMIT if clamped else None,
        swiglu_add_residual=clamped,  # (up + 1) in the place of up
    )
    out = MM(
        x=gated,
        w=down.transpose(1, 2),
        x_scales=None,
        w_scales=down_scales.transpose(1, 2),
        bias=down_bias,
        routing_data=routing,
        gather_indx=None,
        scatter_indx=scatter,
        gammas=routing.gate_scal,
        out_dtype=x.dtype,
        apply_swiglu=False,
        alpha=1.0,
        limit=None,
        swiglu_add_residual=False,
    )
    add_weighted(residual, out, weights)


def refuses(facts: Facts) -> str | None:
    return refusal(facts, SORT, MM, dtypes=(torch.bfloat16,))


IMPL = Impl(moe_mxfp4_paired, "aiter", fused, refuses)
