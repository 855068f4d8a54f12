"""The norm and the product in float64, with the weight decoded number by number."""

import pytest
import torch
from torch import Tensor

from services.worker.kernels.ops.norm_narrow_linear import form_of, narrowed, norm_narrow_linear, widened
from tests.services.worker.kernels.ops.narrow_weights import int4_by_number, int8_by_number, mxfp4_by_number

FORMS = ("rows", "rows8", "blocks", "int8", "int4", "int4z", "mxfp4")


def by_number(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    form = form_of(weight, scales)
    if form == "int4":
        return int4_by_number(weight, scales, zeros)
    if form in ("int8", "mxfp4"):
        return (int8_by_number if form == "int8" else mxfp4_by_number)(weight, scales)
    height, width = len(weight) // len(scales), weight.shape[1] // scales.shape[1]
    return weight.double() * scales.double().repeat_interleave(height, 0).repeat_interleave(width, 1)


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_told_apart_and_decoded(form: str) -> None:
    dense = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    stored = narrowed(dense, form)
    assert form_of(*stored[:2]) == form.rstrip("8z") + ("8" if form == "int8" else "")
    torch.testing.assert_close(widened(*stored).double(), by_number(*stored), rtol=1e-6, atol=1e-7)
    error = (widened(*stored) - dense).abs().mean() / dense.abs().mean()
    assert error < (0.15 if "4" in form else 0.04)


def test_is_the_formula() -> None:
    for case in norm_narrow_linear.cases:
        x, norm, eps, weight, scales, zeros, bias = case.make(torch.float32)
        normed = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
        wanted = normed @ by_number(weight, scales, zeros).T + (0.0 if bias is None else bias.double())
        got = norm_narrow_linear.meaning(x, norm, eps, weight, scales, zeros, bias)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
