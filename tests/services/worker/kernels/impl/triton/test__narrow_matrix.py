"""Each geometry of the matrix kernel gives the product with a narrow weight, with every prologue and epilogue."""

import pytest
import torch

from services.worker.kernels.impl.triton import _dense
from services.worker.kernels.impl.triton._narrow_plan import Inputs, Narrow, Plan, product
from services.worker.kernels.ops.block_scaled_linear import make_block_case
from services.worker.kernels.ops.row_scaled_linear import make_rows_case, row_scaled_linear
from tests.services.worker.kernels.impl.triton.narrow import close, holds


@pytest.mark.parametrize(
    ("form", "rows", "inner", "out", "chosen"),
    [
        ("rows", 3, 96, 30, Plan(16, 16, 32, stages=2)),
        ("rows8", 40, 80, 70, Plan(16, 32, 64, group_m=2)),  # blocks of rows, tails of everything
        ("rows", 5, 192, 34, Plan(16, 16, 32, parts=3)),
        ("int4", 9, 128, 40, Plan(16, 32, 32, parts=2)),
        ("int4z", 3, 256, 34, Plan(16, 16, 64)),  # two steps in a group
        ("int8", 17, 64, 20, Plan(32, 16, 32)),
        ("blocks", 6, 256, 128, Plan(16, 64, 64, parts=2)),
        ("mxfp4", 7, 160, 36, Plan(16, 16, 64)),  # a last step that is half empty
        ("mxfp4", 7, 256, 36, Plan(16, 16, 64, parts=2)),
        ("mxfp4", 3, 256, 36, Plan(16, 16, 128, parts=2, planes=True)),
        ("int4z", 3, 256, 34, Plan(16, 16, 128, planes=True)),
        ("int4z", 3, 384, 34, Plan(16, 16, 64, planes=True)),
    ],
)
def test_every_geometry_gives_the_product(
    device: torch.device, form: str, rows: int, inner: int, out: int, chosen: Plan
) -> None:
    holds(device, form, rows, inner, out, chosen)
    if chosen.parts > 1:
        assert not _dense.workspace(device)[1].any(), "counters are zero again"


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("stored", [torch.int8, None])
def test_both_operands_of_8_bits(device: torch.device, stored: torch.dtype | None, tiled: bool) -> None:
    made = make_rows_case(21, 96, 48, tiled and stored is None, True, stored).make(torch.float32)
    x, scales, weight, weight_scales, bias = (part.to(device) for part in made[:5] if part is not None)
    for chosen in (Plan(16, 32, 64), Plan(32, 16, 32, parts=3, group_m=4)):
        result = torch.full((21, 48), torch.nan, device=device)
        product(Inputs(x, scales, bias=bias), Narrow("rows", weight, weight_scales), result, chosen=chosen)
        close(result, row_scaled_linear.meaning(*made))


def test_scales_of_x_by_column(device: torch.device) -> None:
    x, scales, weight, weight_scales, _ = (
        part.to(device) if isinstance(part, torch.Tensor) else part
        for part in make_block_case(5, 256, 128, tiled=False).make(torch.float32)
    )
    results = []
    for own, by_column in ((scales, False), (scales.T.contiguous(), True)):
        result = torch.full((5, 128), torch.nan, device=device)
        inputs = Inputs(x, own, by_column)
        product(inputs, Narrow("blocks", weight, weight_scales, group=128), result, chosen=Plan(16, 64, 128))
        results.append(result)
    assert torch.equal(*results)
