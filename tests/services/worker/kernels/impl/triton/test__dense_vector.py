"""Each geometry of the one row's kernel gives the same product, with every prologue and epilogue."""

import pytest
import torch

from services.worker.kernels.impl.triton._dense import Plan
from tests.services.worker.kernels.impl.triton.dense import holds


@pytest.mark.parametrize(
    ("rows", "inner", "out", "chosen"),
    [
        (1, 96, 30, Plan("vector", 4, 128)),  # one tile, wider than K
        (1, 96, 30, Plan("vector", 1, 32, warps=1)),
        (1, 80, 18, Plan("vector", 8, 32, warps=2)),  # a last tile that is half empty, a last program too
    ],
)
def test_every_geometry_gives_the_product(device: torch.device, rows: int, inner: int, out: int, chosen: Plan) -> None:
    holds(device, rows, inner, out, chosen)
