"""The experts of moe_int4 whose zero points are whole numbers of four bits too, two to a byte."""

import torch
from torch import Tensor

from services.worker.kernels.ops.moe_int4 import make_int4_moe_case, moe_int4
from services.worker.kernels.registry import Case, op


def pack_rows(zeros: Tensor) -> Tensor:
    """uint8 [E, R, G] of 0 .. 15, R even, as uint8 [E, R / 2, G]: two rows to a byte, the lower half byte first."""
    return zeros[:, ::2] | zeros[:, 1::2] << 4


def unpack_rows(packed: Tensor) -> Tensor:
    """The way back."""
    return torch.stack((packed & 15, packed >> 4), 2).flatten(1, 2)


def whole_case(plain: Case) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        x, weights, experts, up, up_scales, up_zeros, down, down_scales, down_zeros, residual = plain.make(dtype)
        zeros = [None if each is None else pack_rows(each) for each in (up_zeros, down_zeros)]
        return x, weights, experts, up, up_scales, zeros[0], down, down_scales, zeros[1], residual

    return Case(plain.name, make)


def make_whole_case(num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int) -> Case:
    return whole_case(make_int4_moe_case(num_tokens, num_experts, top_k, hidden, inner))


@op(
    cases=[whole_case(case) for case in moe_int4.cases],
    tolerances=moe_int4.tolerances,
    writes=("residual",),
    by_value=True,
)
def moe_int4_whole(
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
    """As moe_int4, with zeros of `pack_rows`: uint8 [E, I, N / group] and [E, N / 2, I / group]; None: 8."""
    zeros = [None if each is None else unpack_rows(each) for each in (gate_up_zeros, down_zeros)]
    moe_int4.meaning(x, weights, experts, gate_up, gate_up_scales, zeros[0], down, down_scales, zeros[1], residual)
