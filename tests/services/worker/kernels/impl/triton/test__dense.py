"""The choice between dense kernels and geometries follows shapes alone."""

import pytest
import torch

from services.worker.kernels.impl.triton import _dense
from services.worker.kernels.impl.triton._dense import APART, Device, Plan, bucket, measured, plan, rule
from services.worker.kernels.impl.triton.add_linear import add_linear_by_rows
from services.worker.kernels.ops.add_linear import add_linear
from tests.services.worker.kernels.impl.triton.dense import arguments, close

CPU = torch.device("cpu")


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
    assert rule(1, 28672, 4096, False, 2, Device()) == Plan("vector", 8, 4096, warps=16)
    assert rule(1, 1024, 2048, False, 2, Device()) == Plan("vector", 2, 2048, warps=8)
    assert rule(1, 4096, 14336, False, 2, Device(lanes=64)) == Plan("vector", 8, 2048, warps=2)


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
