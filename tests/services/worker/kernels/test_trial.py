"""What counts as a difference, and what does not."""

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.kernels.ops.draw import draw
from services.worker.kernels.ops.kv_write import KvScale, kv_write
from services.worker.kernels.ops.linear import make_linear_case
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Facts, Impl, Tolerance
from services.worker.kernels.trial import OnDevice, differences, make_arguments, own_8_bits, try_case

CPU = torch.device("cpu")
NEAR = Tolerance(1e-3, 1e-3, "")


def differ(left: Tensor, right: Tensor, tolerance: Tolerance = NEAR, few: float = 0.0) -> str | None:
    return differences({"result": left}, {"result": right}, {}, tolerance, few)


def test_near_is_right_and_far_is_wrong() -> None:
    right = torch.randn(100, 50, generator=torch.Generator().manual_seed(1))
    assert differ(right + 5e-4, right) is None
    assert "is wrong in 5000 of 5000 numbers" in str(differ(right + 0.1, right))
    rare = right.clone()
    rare[3, 4] += 4 * (1e-3 + 1e-3 * float(right[3, 4].abs()))
    assert "1 of 5000" in str(differ(rare, right)), "one of five thousand is not rare"
    many = right.repeat(10, 1)
    seldom = many.clone()
    seldom[3, 4] = rare[3, 4]
    assert differ(seldom, many) is None
    seldom[3, 4] += 1.0
    assert "is wrong in 1 of 50000" in str(differ(seldom, many)), "however rare, it may not be far"


def test_what_is_not_finite() -> None:
    right = torch.tensor([1.0, -torch.inf, 3.0])
    assert differ(right.clone(), right) is None
    assert differ(torch.tensor([torch.nan, -torch.inf, 3.0]), right) == "result has 1 NaN or infinite numbers of 3"
    assert "is wrong in 1" in str(differ(torch.tensor([1.0, 2.0, 3.0]), right))


def test_whole_numbers_and_copies_are_exact() -> None:
    exact = Tolerance(0.0, 0.0, "a copy")
    assert differ(torch.arange(9), torch.arange(9)) is None
    assert differ(torch.arange(9), torch.arange(1, 10)) == "result differs in 9 of 9 rows"
    assert "is wrong in 1" in str(differ(torch.ones(9), torch.ones(9).index_fill(0, torch.tensor([3]), 1.0001), exact))


def test_a_few_rows_may_be_drawn_otherwise() -> None:
    right = torch.arange(100)
    left = right.clone()
    left[:5] += 1
    assert differ(left, right, few=0.05) is None and differ(left, right) is not None
    left[:20] += 1
    assert differ(left, right, few=0.05) == "result differs in 20 of 100 rows"
    floors = torch.full((3,), -torch.inf)
    assert differ(floors.clone(), floors, few=0.05) is None


def test_shapes_dtypes_and_names() -> None:
    assert "instead of (3,) of torch.float32" in str(differ(torch.zeros(2), torch.zeros(3)))
    assert "torch.float64" in str(differ(torch.zeros(3, dtype=torch.float64), torch.zeros(3)))
    assert differences({}, {"result": torch.zeros(1)}, {}, NEAR, 0.0) == "gives  instead of result"


def test_what_the_meaning_leaves_must_stay_in_every_bit() -> None:
    before, changed = torch.zeros(3), torch.tensor([0.0, 0.0, 1e-9])
    wanted = {"argument.0": before.clone()}
    assert differences({"argument.0": before.clone()}, wanted, {"argument.0": before}, NEAR, 0.0) is None
    reason = differences({"argument.0": changed}, wanted, {"argument.0": before}, NEAR, 0.0)
    assert reason == "argument.0 was changed, and should not be"


def test_8_bit_numbers_may_differ_by_one_unit() -> None:
    right = torch.tensor([1.0, 16.0]).to(torch.float8_e4m3fn)
    assert differ(torch.tensor([1.125, 18.0]).to(torch.float8_e4m3fn), right) is None
    assert differ(torch.tensor([1.0, 26.0]).to(torch.float8_e4m3fn), right) is not None


@pytest.mark.parametrize("op", [rms_norm, draw])
def test_a_meaning_is_right(op: Any) -> None:
    for case in op.cases:
        assert try_case(Impl(op, "triton", op.meaning), case, Facts("cpu"), CPU) is None


def test_random_numbers_are_drawn_where_the_device_is() -> None:
    """Here that is the CPU again: what matters is that a generator goes on, and that a case is the same each time."""
    case = make_linear_case(3, 8, 5, True)
    with OnDevice(CPU):
        x, weight, bias = case.make(torch.float32)
        again = case.make(torch.float32)
    assert torch.equal(x, again[0]) and not torch.equal(x[:1, :5], weight[:1, :5] * 8**0.5) and bias is not None
    with OnDevice(CPU):
        generator = torch.Generator().manual_seed(7)
        first, second = torch.randn(4, generator=generator), torch.randn(4, generator=generator)
    assert not torch.equal(first, second)


def test_pages_come_as_the_implementation_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it leaves in them is compared by tokens."""

    def turned(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()

    monkeypatch.setitem(
        sys.modules, "services.worker.kernels.layout", SimpleNamespace(shuffled=turned, in_order=turned)
    )

    def run(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, kv_scale: KvScale | None) -> None:
        for new, cache in ((k, k_cache), (v, v_cache)):
            cache.permute(0, 2, 1, 3).reshape(-1, *new.shape[1:])  # the shape is what it expects
            for token, slot in enumerate(slots.tolist()):
                cache[slot // cache.shape[2], :, slot % cache.shape[2]] = new[token]

    case = kv_write.cases[0]
    shuffling = Impl(kv_write, "aiter", run, layout=lambda facts: "shuffled")
    assert try_case(shuffling, case, Facts("cpu"), CPU) is None
    with pytest.raises((RuntimeError, IndexError)):
        try_case(Impl(kv_write, "aiter", run), case, Facts("cpu"), CPU)


def test_what_nobody_reads_afterwards_may_be_changed() -> None:
    def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        result = rms_norm.meaning(x, weight, eps)
        x.zero_()
        return result

    loose = dataclasses.replace(rms_norm, scratch=("x",))
    case = rms_norm.cases[0]
    assert (
        try_case(Impl(rms_norm, "aiter", run), case, Facts("cpu"), CPU) == "argument.0 was changed, and should not be"
    )
    assert try_case(Impl(loose, "aiter", run), case, Facts("cpu"), CPU) is None


def test_8_bit_numbers_of_gfx942_are_its_own() -> None:
    case = kv_write.cases[3]
    here, there = (make_arguments(case, Facts("cpu", arch), CPU) for arch in ("gfx950", "gfx942"))
    assert here[2].dtype == torch.float8_e4m3fn and there[2].dtype == torch.float8_e4m3fnuz
    assert torch.equal(here[2].float(), there[2].float()), "the same values, not the same bits"
    assert own_8_bits(torch.tensor([448.0, -0.0]).to(torch.float8_e4m3fn)).float().tolist() == [240.0, 0.0]
    assert try_case(Impl(kv_write, "aiter", kv_write.meaning), case, Facts("cpu", "gfx942"), CPU) is None
