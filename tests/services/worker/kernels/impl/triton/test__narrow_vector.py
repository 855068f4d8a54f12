"""Each geometry of the single rows' kernel gives the product with a narrow weight, of one weight or of many experts."""

import pytest
import torch

from services.worker.kernels.impl.triton._narrow_plan import HALVED, Inputs, Narrow, Plan, launch_vector
from services.worker.kernels.ops.norm_narrow_linear import narrowed, widened
from services.worker.kernels.packing.weight_tiles import tile_weight
from tests.services.worker.kernels.impl.triton.narrow import activations, close, holds


@pytest.mark.parametrize(
    ("form", "inner", "out", "chosen"),
    [
        ("rows", 96, 30, Plan(1, 4, 128)),  # one tile, wider than K
        ("rows8", 80, 18, Plan(1, 8, 32, 2)),  # a last tile that is half empty, a last program too
        ("blocks", 256, 128, Plan(1, 32, 128, 1)),
        ("int8", 160, 18, Plan(1, 8, 64, 1)),
        ("int4", 96, 34, Plan(1, 4, 64, 1)),
        ("int4z", 256, 12, Plan(1, 4, 512, 2)),
        ("mxfp4", 160, 10, Plan(1, 4, 64, 1)),
        ("rows8", 80, 8, Plan(1, 4, 64, 2, dots=True)),
        ("int8", 96, 8, Plan(1, 4, 64, 1, dots=True)),
        ("mxfp4", 96, 8, Plan(1, 4, 64, 1, dots=True)),
        ("int4", 96, 8, Plan(1, 4, 64, 1, dots=True)),
        ("int4z", 256, 12, Plan(1, 4, 512, 2, dots=True)),
        ("rows", 80, 8, Plan(1, 4, 64, 2, dots=True)),
        ("rows", 256, 16, Plan(1, 8, 256, 1, dots=True)),
        ("blocks", 256, 128, Plan(1, 32, 128, 1, dots=True)),
    ],
)
def test_every_geometry_gives_the_product(device: torch.device, form: str, inner: int, out: int, chosen: Plan) -> None:
    holds(device, form, 1, inner, out, chosen)


@pytest.mark.parametrize(
    ("form", "dots"), [("rows", False), ("int4", False), ("int4", True), ("mxfp4", True), ("rows", True)]
)
def test_pairs_are_multiplied_by_their_experts(device: torch.device, form: str, dots: bool) -> None:
    dense = torch.randn(3, 32, 96, generator=torch.Generator().manual_seed(0)) / 10
    each = [narrowed(matrix, form) for matrix in dense]
    wide = torch.stack([widened(*stored) for stored in each])
    numbers, scales = (torch.stack(parts).to(device) for parts in zip(*(stored[:2] for stored in each), strict=True))
    halves = dots and form in HALVED
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(1)).to(
        torch.bfloat16 if halves else activations(device)
    )
    experts = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    wanted = torch.einsum("tkni,ti->tkn", wide[experts.long()], x.float()).flatten(0, 1)
    for tiled in (False, True) if form == "rows" else (False,):
        narrow = Narrow(form, tile_weight(numbers) if tiled else numbers, scales, group=32)
        result = torch.full((4, 32), torch.nan, dtype=activations(device), device=device)
        launch_vector(
            Inputs(x.to(device)), narrow, result, Plan(1, 16, 64, 1, dots=dots), experts=experts.to(device), top_k=2
        )
        close(result, wanted, halves)
