"""The choice among geometries follows shapes alone, and fits the device."""

import pytest
import torch

from services.worker.kernels.impl.triton import _narrow_plan
from services.worker.kernels.impl.triton._dense import Device
from services.worker.kernels.impl.triton._narrow_plan import (
    WIDE,
    Inputs,
    Narrow,
    Plan,
    by_planes,
    choose,
    geometry,
    rule,
    shares_fit,
    step_of,
    strides,
)

H200, SMALL = Device(), Device(304, 64, 56 * 1024)
FORMS = (("rows", 0, 1), ("rows", 0, 2), ("blocks", 128, 1), ("int4", 128, 2), ("int4", 32, 2), ("mxfp4", 32, 0))


@pytest.mark.parametrize("device", [H200, SMALL])
@pytest.mark.parametrize(("form", "group", "x_bytes"), FORMS)
def test_tiles_fit_the_device(form: str, group: int, x_bytes: int, device: Device) -> None:
    for rows in (2, 16, 64, 128):
        for out, inner in ((6144, 4096), (4096, 14336), (28672, 4096), (1536, 2048)):
            for gated in (False, True):
                plan = geometry(form, rows, out, inner, group, x_bytes, gated, device)
                weight = 0.5 if form in ("int4", "mxfp4") else 1.0
                tile = (plan.block_n * (2 if gated else 1) * weight + plan.block_m * max(x_bytes, 1)) * plan.block_k
                assert tile * plan.stages <= max(device.shared, tile * 2)
                assert plan.block_m >= min(rows, 128) and plan.stages >= 2
                assert form != "int4" or group % plan.block_k == 0, "a step has one group"
                assert plan.parts == 1 or inner % (plan.parts * plan.block_k) == 0


def test_few_rows_occupy_all_processors() -> None:
    assert rule("rows", 16, 4096, 14336, 0, 1, False, H200) == Plan(16, 64, 128, 4, 5, 4, exact=128)
    assert rule("rows", 16, 28672, 4096, 0, 1, False, H200).parts == 1
    assert rule("rows", 128, 4096, 4096, 0, 1, False, H200) == Plan(128, 128, 128, 8, 4, 1, 8)


def test_parts_are_whole_steps() -> None:
    assert choose_parts(14336) == 4 and choose_parts(2880) == 1 == choose_parts(4096 + 128)
    assert not shares_fit(Plan(16, 64, 128, parts=2), 4096, 4096 + 128, False), "the second would read past the end"
    assert not shares_fit(Plan(64, 64, 128, parts=8), 28672, 4096, False), "no room"


def choose_parts(inner: int) -> int:
    return rule("rows", 16, 4096, inner, 0, 1, False, H200).parts


def test_one_row_takes_the_vector_kernel_unless_x_is_packed() -> None:
    assert rule("rows", 1, 6144, 4096, 0, 4, False, H200) == Plan(1, 8, 1024, 4)
    assert rule("rows", 1, 6144, 4098, 0, 2, False, H200).block_m == 16, "half a word"
    assert rule("rows", 1, 4100, 4096, 0, 4, False, H200).block_n == 4, "whole blocks of outputs"
    assert rule("rows", 1, 512, 4096, 0, 4, False, H200).block_n == 1
    assert rule("mxfp4", 1, 6144, 4096, 32, 0, False, H200).block_m == 16


def test_one_row_of_integers_goes_by_dots_where_spans_are_whole() -> None:
    assert rule("int4", 1, 6144, 4096, 128, 2, False, H200) == Plan(1, 16, 4096, 4, dots=True)
    assert rule("int4", 1, 14336, 4096, 128, 2, True, H200).block_n == 8, "of gate and of up"
    assert rule("mxfp4", 1, 4096, 14336, 32, 2, False, H200) == Plan(1, 16, 2048, 2, dots=True), "no columns past K"
    assert rule("rows8", 1, 4096, 4096, 0, 2, False, H200) == Plan(1, 16, 2048, 4, dots=True)
    assert rule("rows8", 1, 2048, 4096, 0, 2, False, SMALL).block_n == 4, "for all processors"
    assert not rule("int8", 1, 4096, 4096, 8, 2, False, H200).dots, "a span has two scales"
    assert not rule("rows8", 1, 4096, 4100, 0, 2, False, H200).dots
    for form in ("rows", "blocks"):
        assert rule(form, 1, 6144, 4096, 128, 2, False, H200) == Plan(1, 8, 2048, 4, dots=True), "e4m3 in halves"
        assert not rule(form, 1, 6144, 4096, 128, 4, False, H200).dots, "fp16 has too few bits for x"
        assert not rule(form, 1, 6144, 4096, 128, 2, False, SMALL).dots, "AMD has no such conversion"
    int8 = Narrow("rows", torch.zeros(2, 4, dtype=torch.int8), torch.ones(2, 1))
    assert (int8.asked(1), int8.asked(2)) == ("rows8", "rows")


def test_x_lies_by_planes_where_four_bits_have_some_rows_of_16_bits() -> None:
    for form in ("int4", "mxfp4"):
        assert rule(form, 64, 6144, 4096, 128, 2, False, H200).planes
        assert not rule(form, 16, 6144, 4096, 128, 2, False, H200).planes, "the norm is in the launch"
        assert not rule(form, 64, 6144, 4096, 128, 2, False, SMALL).planes, "no words there"
    assert not rule("int4", 64, 6144, 4096, 32, 2, False, H200).planes, "steps of 32 columns"
    assert not rule("rows", 64, 6144, 4096, 0, 2, False, H200).planes
    weight = Narrow("int4", torch.zeros(8, 128, dtype=torch.uint8), torch.ones(8, 2), group=128)
    inputs = Inputs(torch.zeros(2, 256))
    assert by_planes(inputs, weight, Plan(16, 16, 128, planes=True))
    assert not by_planes(inputs, weight, Plan(16, 16, 128, parts=4, planes=True)), "no whole steps"
    assert not by_planes(inputs, weight, WIDE)


def test_many_rows_take_a_widened_weight_where_x_is_wide() -> None:
    for form in ("int4", "mxfp4", "int8", "blocks"):
        assert rule(form, 128, 4096, 4096, 128, 2, False, H200) == WIDE
        assert rule(form, 64, 4096, 4096, 128, 2, False, H200).block_m == 64
    assert rule("blocks", 128, 4096, 4096, 128, 1, False, H200).block_m == 128, "x is rounded"
    assert rule("rows", 128, 4096, 4096, 0, 2, False, H200).block_m == 128
    assert rule("int4", 128, 4096, 4096, 128, 2, False, Device(processors=1)) != WIDE


def test_long_sums_of_8_bits_are_kept_in_fp32() -> None:
    assert rule("rows", 128, 4096, 14336, 0, 1, False, H200).exact == 128
    assert rule("rows", 128, 4096, 4096, 0, 1, False, H200).exact == 0
    assert rule("rows", 64, 4096, 14336, 0, 2, False, H200).exact == 0, "products of bf16"


def test_a_step_is_no_more_than_a_group() -> None:
    assert [step_of("int4", group, 2) for group in (32, 64, 96, 128, 4096)] == [32, 64, 32, 128, 128]
    assert step_of("int8", 16, 2) == 16 and step_of("int8", 128, 2) == 64
    assert step_of("rows", 0, 1) == 128 and step_of("rows", 0, 2) == 64


def test_a_measurement_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"form": "int4", "rows": 16, "out": 96, "in": 256, "group": 128, "x_bytes": 2, "gated": False}
    best = Plan(16, 32, 128, 2, 3, 2)
    monkeypatch.setattr(_narrow_plan, "table", lambda op, device: ({**row, **best._asdict(), "us": 3.0},))
    device = torch.device("meta")  # nobody else's entry in the cache
    monkeypatch.setattr(_narrow_plan, "describe", lambda device: H200)
    assert choose("int4", 16, 96, 256, 128, 2, False, device) == best
    assert choose("int4", 16, 96, 512, 128, 2, False, device) == rule("int4", 16, 96, 512, 128, 2, False, H200) != best


def test_where_scales_of_x_lie() -> None:
    assert strides(None, 4, False) == strides(torch.ones(1), 4, False) == (0, 0)
    assert strides(torch.ones(4, 1), 4, False) == (1, 1)
    assert strides(torch.ones(4, 6), 4, False) == (6, 1)
    assert strides(torch.ones(6, 4), 4, True) == (1, 4)


def test_shapes_of_weights() -> None:
    assert Narrow("int4", torch.zeros(6, 16), torch.ones(6, 1)).shape == (6, 32)
    assert Narrow("rows", torch.zeros(2, 4, 6, 16, 16), torch.ones(1)).shape == (64, 96)
    assert Narrow("rows", torch.zeros(2, 6, 16), torch.ones(1)).tiled is False
