"""AITER's fused experts, and what the formats of their weights share.

Weights lie in tiles: AITER's tuned kernels are those for shuffled weights, and it takes other weights for such without
a word. The mark that AITER looks for is an attribute of a tensor object, which every view and copy loses.
"""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function, constant, refusal
from services.worker.kernels.packing.weight_tiles import as_matrix
from services.worker.kernels.registry import Facts

FUSED = Function(
    "aiter.fused_moe:fused_moe",
    needs=("hidden_states", "w1", "w2", "topk_weight", "topk_ids", "activation", "quant_type", "w1_scale", "w2_scale"),
)
WIDTH = 128  # rows and columns of experts come in multiples of it in AITER's default kernels


def shuffled(tiles: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Tiles as AITER names them, [E, N, K], and marked; `dtype`: another name for the same bytes. No copy."""
    weight = as_matrix(tiles)
    weight = weight if dtype is None else weight.view(dtype)
    weight.is_shuffled = True  # type: ignore[attr-defined]
    return weight


def add_fused(
    residual: Tensor,
    x: Tensor,
    routing: tuple[Tensor, Tensor],
    experts: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
    quant_type: str,
) -> None:
    """residual += the experts' sum. routing: weights and experts of the op; experts: gate_up and down, `shuffled`;
    quant_type: a name in aiter.QuantType.
    """
    if not len(x):
        return
    out: Tensor = FUSED(
        hidden_states=x,
        w1=experts[0],
        w2=experts[1],
        topk_weight=routing[0],
        topk_ids=routing[1],
        activation=constant("aiter:ActivationType.Silu"),
        quant_type=constant(f"aiter:QuantType.{quant_type}"),
        w1_scale=scales[0],
        w2_scale=scales[1],
    )
    residual.add_(out)


def refuses_experts(facts: Facts, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> str | None:
    if (inner := facts.shapes.get("expert_size", WIDTH)) % WIDTH:
        return f"experts of multiples of {WIDTH}, not of {inner}"
    return refusal(facts, FUSED, dtypes=dtypes)
