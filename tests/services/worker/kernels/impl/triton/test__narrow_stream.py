"""Programs that go through several blocks of outputs give the product with a narrow weight."""

import pytest
import torch

from services.worker.kernels.impl.triton._narrow_plan import Inputs, Plan, launch_vector
from tests.services.worker.kernels.impl.triton.narrow import activations, close, holds, weight_of


@pytest.mark.parametrize(
    ("form", "inner", "out", "chosen"),
    [
        ("rows", 80, 24, Plan(1, 4, 128, 2, dots=True, blocks=3)),
        ("rows8", 128, 32, Plan(1, 4, 128, 1, dots=True, blocks=2)),
        ("blocks", 256, 256, Plan(1, 32, 256, 1, dots=True, blocks=4)),
        ("int8", 96, 8, Plan(1, 4, 128, 1, dots=True, blocks=2)),
        ("int4z", 256, 12, Plan(1, 2, 512, 2, dots=True, blocks=3)),
        ("mxfp4", 96, 8, Plan(1, 2, 128, 1, dots=True, blocks=2)),
    ],
)
def test_every_form_gives_the_product(device: torch.device, form: str, inner: int, out: int, chosen: Plan) -> None:
    holds(device, form, 1, inner, out, chosen)


def test_rows_of_experts_take_the_same_geometry_block_by_block(device: torch.device) -> None:
    narrow, wide = weight_of("mxfp4", 16, 96, device)
    stack = narrow._replace(weight=narrow.weight[None], scales=narrow.scales[None])
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(0)).to(activations(device))
    result = torch.full((2, 16), torch.nan, dtype=x.dtype, device=device)
    experts = torch.zeros(2, 1, dtype=torch.int32, device=device)
    plan = Plan(1, 2, 128, 1, dots=True, blocks=2)
    launch_vector(Inputs(x.to(device)), stack, result, plan, experts=experts)
    close(result, x.float() @ wide.T)
