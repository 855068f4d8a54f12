"""A product with a weight of 8 or 4 bits (see norm_narrow_linear), added onto the residual stream in place."""

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.norm_narrow_linear import NARROW_TOLERANCES, make_norm_narrow_case, widened
from services.worker.kernels.registry import Case, op


def make_add_narrow_case(num_tokens: int, in_features: int, out_features: int, form: str, biased: bool = False) -> Case:
    plain = make_norm_narrow_case(num_tokens, in_features, out_features, form, biased)

    def make(dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        x, _, _, *stored = plain.make(dtype)
        residual = torch.randn(num_tokens, out_features, generator=torch.Generator().manual_seed(in_features)) * 3
        return residual.to(dtype), x / 3, *stored

    return Case(plain.name, make)


@op(
    cases=[
        make_add_narrow_case(1, 512, 96, "int4z", True),
        make_add_narrow_case(3, 160, 70, "int4"),
        make_add_narrow_case(1, 576, 60, "rows"),
        make_add_narrow_case(5, 128, 48, "rows8", True),
        make_add_narrow_case(2, 256, 128, "blocks"),
        make_add_narrow_case(1, 384, 40, "mxfp4"),
        make_add_narrow_case(0, 64, 32, "rows"),
    ],
    tolerances=NARROW_TOLERANCES,
    writes=("residual",),
)
def add_narrow_linear(
    residual: Tensor, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None
) -> None:
    """residual += x @ widened.T + bias, in place. residual: [T, out], contiguous; x: [T, in]; the others as there."""
    wide = widened(weight, scales, zeros)
    residual.add_(functional.linear(x.float(), wide, None if bias is None else bias.float()))
