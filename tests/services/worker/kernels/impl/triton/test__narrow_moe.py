"""Mixtures in narrow weights, on both paths, against the sum with widened weights; some experts have no tokens."""

import pytest
import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_moe, _narrow_planes, _quantize
from services.worker.kernels.impl.triton._moe_plan import FEW_TOKENS
from services.worker.kernels.impl.triton._narrow_fused import narrow_of
from services.worker.kernels.impl.triton._narrow_moe import Routed
from services.worker.kernels.impl.triton._narrow_plan import Narrow, Plan
from services.worker.kernels.ops.moe_gated import make_moe_case
from services.worker.kernels.ops.moe_row_scaled import add_experts, rounded_rows
from services.worker.kernels.ops.norm_narrow_linear import narrowed, widened
from services.worker.kernels.packing.fnuz import native_fp8
from tests.services.worker.kernels.impl.triton.narrow import activations, close

EXPERTS, HIDDEN, INNER = 5, 128, 96


def stacked(dense: Tensor, form: str, device: torch.device) -> tuple[Narrow, Tensor]:
    each = [narrowed(matrix, form) for matrix in dense.float()]
    numbers, scales = (torch.stack(parts).to(device) for parts in zip(*(stored[:2] for stored in each), strict=True))
    zeros = None if each[0][2] is None else torch.stack([part[2] for part in each if part[2] is not None]).to(device)
    one = narrow_of(*each[0])
    return one._replace(weight=numbers, scales=scales, zeros=zeros), torch.stack([widened(*part) for part in each])


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("form", ["rows", "int4", "mxfp4"])
def test_the_sum_of_what_the_experts_give(device: torch.device, form: str, tokens: int) -> None:
    holds(device, form, tokens, torch.bfloat16 if form == "mxfp4" else activations(device))


@pytest.mark.parametrize("form", ["int4z", "mxfp4"])
def test_what_the_first_product_gives_lies_by_the_second_ones_planes(
    device: torch.device, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def planned(*args: object) -> Plan:
        asked.append(args)
        return Plan(16, 32, 128, stages=2, planes=True)

    monkeypatch.setattr(_narrow_moe, "grouped_plan", planned)
    launched = []
    launch = _narrow_planes.launch
    monkeypatch.setattr(_narrow_planes, "launch", lambda *args: launched.append(args) or launch(*args))
    monkeypatch.setattr(f"{__name__}.INNER", 128)
    holds(device, form, 20, torch.bfloat16)
    assert len(asked) == 2 and len(launched) == 1, "of x, not of what is gated"


@pytest.mark.parametrize("form", ["int4", "mxfp4"])
def test_many_rows_of_experts_take_widened_weights(
    device: torch.device, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_narrow_moe, "WIDE_ROWS", 4)
    monkeypatch.setattr(_narrow_moe, "run_grouped", None)
    holds(device, form, 20, torch.bfloat16)


def holds(device: torch.device, form: str, tokens: int, dtype: torch.dtype) -> None:
    made = make_moe_case(tokens, EXPERTS, 2, HIDDEN, INNER, used=3).make(dtype)
    x, weights, experts, gate_up, down, residual = made
    up, wide_up = stacked(gate_up, form, device)
    out, wide_out = stacked(down, form, device)
    got, wanted = residual.to(device).clone(), residual.float().clone()
    rounds = form == "rows" and tokens > FEW_TOKENS

    def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
        return _quantize.launch(values, native_fp8())[:2]

    routed = Routed(*(part.to(device) for part in (x, weights, experts)))
    _narrow_moe.run(routed, up, out, got, rounded if form == "rows" else None)
    add_experts(
        x,
        weights,
        experts,
        lambda e: (wide_up[e], wide_out[e]),
        rounded_rows(native_fp8()) if rounds else lambda values: values,
        wanted,
    )
    if rounds or dtype == torch.bfloat16:
        torch.testing.assert_close(got.cpu().float(), wanted, rtol=2e-2, atol=6e-2)
    else:
        close(got, wanted)
