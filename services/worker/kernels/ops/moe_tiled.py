"""The experts of a mixture (see moe_gated) with weights in tiles that matrix cores read in one piece."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from services.worker.kernels.ops.moe_gated import make_moe_case, moe_gated
from services.worker.kernels.packing.weight_tiles import fits_tiles, tile_weight, untile_weight
from services.worker.kernels.registry import Case, Sizes, op


def tiled_case(plain: Case) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, weights, experts, gate_up, down, residual = plain.make(dtype)
        return x, weights, experts, tile_weight(gate_up), tile_weight(down), residual

    return Case(plain.name, make)


@op(
    cases=[
        tiled_case(make_moe_case(1, 16, 8, 256, 128)),
        tiled_case(make_moe_case(3, 8, 2, 64, 32)),
        tiled_case(make_moe_case(20, 6, 2, 96, 64, used=2)),
        tiled_case(make_moe_case(66, 2, 2, 64, 64)),
        tiled_case(make_moe_case(0, 8, 2, 64, 32)),
    ],
    tolerances=moe_gated.tolerances,
    writes=("residual",),
    by_value=True,
)
def moe_tiled(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor) -> None:
    """As moe_gated, with gate_up and down the tiles (packing.weight_tiles) of its [E, 2I, N] and [E, N, I]."""
    moe_gated.meaning(x, weights, experts, untile_weight(gate_up), untile_weight(down), residual)


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """At a model's own sizes, for the self-test at start. `sizes.all`: numbers of tokens."""
    hidden, inner = shapes.get("hidden_size", 0), shapes.get("expert_size", 0)
    if shapes.get("num_experts") and fits_tiles(hidden, inner) and fits_tiles(inner, hidden):
        for tokens in sizes.all:
            yield tiled_case(make_moe_case(tokens, shapes["num_experts"], shapes["top_k"], hidden, inner))
