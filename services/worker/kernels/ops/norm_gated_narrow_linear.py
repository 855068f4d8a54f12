"""The first half of a gated MLP, norm, gate and up, with a weight of 8 or 4 bits (see norm_narrow_linear)."""

import torch
from torch import Tensor

from services.worker.kernels.ops.norm_gated_linear import norm_gated_linear
from services.worker.kernels.ops.norm_narrow_linear import NARROW_TOLERANCES, make_norm_narrow_case, widened
from services.worker.kernels.registry import Case, op


def make_gated_narrow_case(num_tokens: int, in_features: int, width: int, form: str, activation: str = "silu") -> Case:
    plain = make_norm_narrow_case(num_tokens, in_features, 2 * width, form)

    def make(dtype: torch.dtype) -> tuple[Tensor | float | str | None, ...]:
        return *plain.make(dtype), activation

    return Case(f"{num_tokens}x{in_features}x{width}{form}{activation}", make)


@op(
    cases=[
        make_gated_narrow_case(1, 512, 96, "int4z"),
        make_gated_narrow_case(3, 160, 35, "int4", "gelu_tanh"),
        make_gated_narrow_case(1, 576, 60, "rows"),
        make_gated_narrow_case(5, 128, 24, "rows8"),
        make_gated_narrow_case(2, 256, 128, "blocks"),
        make_gated_narrow_case(1, 384, 40, "mxfp4"),
        make_gated_narrow_case(0, 64, 32, "rows"),
    ],
    tolerances=NARROW_TOLERANCES,
)
def norm_gated_narrow_linear(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    """activation(gate) * up, the halves of norm_narrow_linear(x, ...), gate rows first. Returns a new [T, out / 2].

    activation: "silu" or "gelu_tanh"; the others as there.
    """
    wide = widened(weight, scales, zeros)
    return norm_gated_linear.meaning(
        x.float(), norm.float(), eps, wide, None if bias is None else bias.float(), activation
    ).to(x.dtype)
