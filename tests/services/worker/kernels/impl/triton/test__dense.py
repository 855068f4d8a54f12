"""Each geometry of the dense products gives the same product, and the choice between them follows shapes alone."""

import pytest
import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _dense
from services.worker.kernels.impl.triton._dense import APART, Device, Plan, bucket, measured, plan, rule
from services.worker.kernels.impl.triton.add_linear import add_linear_by_rows
from services.worker.kernels.ops.add_linear import add_linear
from services.worker.kernels.ops.norm_gated_linear import norm_gated_linear
from services.worker.kernels.ops.norm_linear import norm_linear

CPU = torch.device("cpu")


def arguments(device: torch.device, rows: int, inner: int, out: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, norm, weight, bias; fp32 under the interpreter, where sums are exact enough to tell geometries apart."""
    generator = torch.Generator().manual_seed(rows + inner)
    x = torch.randn(rows, inner, generator=generator)
    norm = torch.rand(inner, generator=generator) + 0.5
    weight = torch.randn(out, inner, generator=generator) / inner**0.5
    bias = torch.randn(out, generator=generator)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x, norm, weight, bias = (t.to(device, dtype) for t in (x, norm, weight, bias))
    return x, norm, weight, bias


def close(got: Tensor, wanted: Tensor) -> None:
    tolerance = 5e-5 if got.dtype == torch.float32 else 6e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("rows", "inner", "out", "chosen"),
    [
        (1, 96, 30, Plan("vector", 4, 128)),  # one tile, wider than K
        (1, 96, 30, Plan("vector", 1, 32, warps=1)),
        (1, 80, 18, Plan("vector", 8, 32, warps=2)),  # a last tile that is half empty, a last program too
        (3, 96, 30, Plan("matrix", 16, 32, stages=3, depth=2)),
        (16, 96, 34, Plan("matrix", 16, 64, 4, stages=3)),
        (9, 64, 40, Plan("matrix", 32, 64, 2)),  # all of K in one tile, split
        (20, 80, 40, Plan("matrix", 64, 128)),  # all of K in one tile that is wider
        (40, 144, 18, Plan("matrix", 16, 64, 2, stages=2, depth=1)),
        (3, 144, 40, Plan("matrix", 16, 32, 1, 3, stages=2)),  # the last part is short
        (17, 128, 30, Plan("matrix", 32, 32, 2, 4)),  # a part is one tile
    ],
)
def test_every_geometry_gives_the_product(device: torch.device, rows: int, inner: int, out: int, chosen: Plan) -> None:
    x, norm, weight, bias = arguments(device, rows, inner, out)
    result = torch.full((rows, out), torch.nan, dtype=x.dtype, device=device)
    _dense.product(x, (norm, 1e-5), weight, bias, result, chosen)
    close(result, norm_linear.meaning(x, norm, 1e-5, weight, bias))
    result = torch.full((rows, out // 2), torch.nan, dtype=x.dtype, device=device)
    _dense.product(x, (norm, 1e-5), weight, bias, result, chosen, "gelu_tanh")
    close(result, norm_gated_linear.meaning(x, norm, 1e-5, weight, bias, "gelu_tanh"))
    result, wanted = bias.expand(rows, out).clone(), bias.expand(rows, out).clone()
    add_linear.meaning(wanted, x, weight, None)
    _dense.product(x, None, weight, None, result, chosen, add=True)
    close(result, wanted)
    if chosen.parts > 1:
        assert not _dense.workspace(x.device)[1].any(), "counters are zero again"


def test_many_rows_are_added_by_torch(device: torch.device) -> None:
    x, _, weight, bias = arguments(device, 65, 32, 24)
    result, wanted = torch.ones(2, 65, 24, dtype=x.dtype, device=device)
    add_linear_by_rows(result, x, weight, bias)
    add_linear.meaning(wanted, x, weight, bias)
    close(result, wanted)


def test_buckets_hold_their_rows() -> None:
    assert [bucket(rows) for rows in (0, 1, 2, 4, 5, 16, 17, 33, 64, 65)] == [0, 1, 4, 4, 16, 16, 32, 64, 64, 0]


def test_the_rule_fits_the_device() -> None:
    for shared in (56 * 1024, 200 * 1024):
        for limit in (4, 16, 32, 64):
            for out, inner in ((128, 2048), (4096, 1024), (28672, 4096), (4096, 14336), (151936, 1024)):
                chosen = rule(limit, out, inner, True, 2, Device(shared=shared))
                tile = (2 * chosen.block_n + max(16, limit)) * chosen.block_k * 2
                assert chosen.path == "matrix" and chosen.stages >= 1 and tile * chosen.stages <= shared
    # one row: all processors have work, wide loads
    assert rule(1, 28672, 4096, False, 2, Device()) == Plan("vector", 4, 1024)
    assert rule(1, 1024, 2048, False, 2, Device()) == Plan("vector", 1, 1024)


def test_the_nearest_measurement_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        {"rows": 16, "out": 4096, "in": 4096, "path": "matrix", "block_n": 32, "block_k": 128, "us": 9.0},
        {"rows": 16, "out": 6144, "in": 4096, "path": "apart"},
        {"rows": 1, "out": 6144, "in": 4096, "path": "vector", "block_n": 2, "block_k": 1024},
    )
    monkeypatch.setattr(_dense, "table", lambda kind, device: rows)
    assert measured("add_linear", 16, 4096, 4096, CPU) == Plan("matrix", 32, 128)
    assert measured("add_linear", 16, 6144, 4096, CPU) == APART
    assert measured("add_linear", 16, 7000, 4096, CPU) == APART
    assert measured("add_linear", 1, 4096, 4096, CPU) == Plan("vector", 2, 1024)
    assert measured("add_linear", 16, 4096, 512, CPU) is None
    assert measured("add_linear", 64, 4096, 4096, CPU) is None


def test_parts_that_do_not_fit_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"rows": 64, "out": 4096, "in": 4096, "path": "matrix", "block_n": 64, "block_k": 64, "parts": 4}
    monkeypatch.setattr(_dense, "table", lambda kind, device: (row,))
    plan.cache_clear()
    assert plan("add_linear", 64, 4096, 4096, torch.bfloat16, CPU).parts == 4
    assert plan("add_linear", 64, 8192, 4096, torch.bfloat16, CPU).parts == 4
    monkeypatch.setattr(_dense, "PARTS_LIMIT", 1 << 20)
    plan.cache_clear()
    assert plan("add_linear", 64, 8192, 4096, torch.bfloat16, CPU).parts == 1
    plan.cache_clear()


def test_half_precision_is_normed_before_it_is_rounded() -> None:
    assert plan("norm_linear", 16, 4096, 1024, torch.float16, CPU) == APART
    assert plan("norm_linear", 1, 4096, 1024, torch.float16, CPU).path == "vector"
    assert plan("add_linear", 16, 4096, 1024, torch.float16, CPU).path == "matrix"
    assert plan("norm_linear", 0, 4096, 1024, torch.bfloat16, CPU) == APART
