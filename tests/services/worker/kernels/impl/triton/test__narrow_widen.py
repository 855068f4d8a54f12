"""The widened weight is what its numbers and scales stand for, and many rows are multiplied with it."""

import pytest
import torch

from services.worker.kernels.impl.triton import _narrow_fused, _narrow_plan, _narrow_widen
from services.worker.kernels.impl.triton._narrow_plan import FEW, WIDE, Inputs, Narrow, product, widens
from services.worker.kernels.ops.norm_linear import norm_linear
from services.worker.kernels.ops.row_scaled_linear import make_operands
from services.worker.kernels.packing.weight_tiles import tile_weight
from tests.services.worker.kernels.impl.triton.narrow import activations, close, weight_of


@pytest.mark.parametrize("form", ["rows", "rows8", "blocks", "int8", "int4", "int4z", "mxfp4"])
def test_every_form_is_widened(device: torch.device, form: str) -> None:
    narrow, wide = weight_of(form, 128 if form == "blocks" else 38, 640, device)
    got = _narrow_widen.launch(*narrow[:4], narrow.group, narrow.row_scale, narrow.shape, torch.float32)
    torch.testing.assert_close(got.cpu(), wide, rtol=1e-6, atol=0)


def test_tiles_are_widened(device: torch.device) -> None:
    narrow, wide = weight_of("rows", 32, 64, device)
    tiles = Narrow("rows", tile_weight(narrow.weight), narrow.scales)
    got = _narrow_widen.launch(*tiles[:4], 0, True, tiles.shape, torch.float32)
    torch.testing.assert_close(got.cpu(), wide, rtol=1e-6, atol=0)


def test_many_rows_are_multiplied_with_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = activations(device)
    narrow, wide = weight_of("blocks", 128, 256, device)
    x, _, bias = (part.to(dtype).float() for part in make_operands(FEW + 2, 256, 128))
    own, own_bias = x.to(device, dtype), bias.to(device, dtype)
    for add in (False, True):
        for given in (None, own_bias):
            result = torch.ones((len(x), 128), dtype=dtype, device=device)
            product(Inputs(own, bias=given), narrow, result, add, chosen=WIDE)
            close(result, x @ wide.T + (0 if given is None else bias) + (1 if add else 0))
    monkeypatch.setattr(_narrow_plan, "choose", lambda *asked: WIDE)
    assert widens(narrow, own) and not widens(narrow, own[:FEW])
    norm = torch.linspace(0.5, 1.5, 256)
    got = _narrow_fused.after_norm(own, (norm.to(device, dtype), 1e-5), narrow, own_bias)
    close(got, norm_linear.meaning(x, norm.to(dtype).float(), 1e-5, wide, bias))  # blocks would have been rounded
