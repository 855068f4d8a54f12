"""Each geometry of the few rows' kernel gives the same product, with every prologue and epilogue."""

import pytest
import torch

from services.worker.kernels.impl.triton._dense import Plan
from tests.services.worker.kernels.impl.triton.dense import holds


@pytest.mark.parametrize(
    ("rows", "inner", "out", "chosen"),
    [
        (3, 96, 30, Plan("matrix", 16, 32, stages=3, depth=2)),
        (16, 96, 34, Plan("matrix", 16, 64, 4, stages=3)),
        (9, 64, 40, Plan("matrix", 32, 64, 2)),  # all of K in one tile, split
        (20, 80, 40, Plan("matrix", 64, 128)),  # all of K in one tile that is wider
        (40, 144, 18, Plan("matrix", 16, 64, 2, stages=2, depth=1)),
        (3, 144, 40, Plan("matrix", 16, 32, 1, 3, stages=2)),  # the last part is short
        (5, 64, 64, Plan("matrix", 16, 32, 1, 2, stages=2)),  # outputs that a GPU stores by 16 bytes
        (17, 128, 30, Plan("matrix", 32, 32, 2, 4)),  # a part is one tile
    ],
)
def test_every_geometry_gives_the_product(device: torch.device, rows: int, inner: int, out: int, chosen: Plan) -> None:
    holds(device, rows, inner, out, chosen)
