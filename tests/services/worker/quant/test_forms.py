import pytest
import torch

from services.worker.kernels.ops.norm_quantize_mxfp4 import make_norm_mxfp4_case
from services.worker.kernels.packing.mx import decode_mxfp8
from services.worker.quant.coded import CodedFormat, Making
from services.worker.quant.contract import Norm
from services.worker.quant.forms import ByGroup, ByRow, ByTensor, Mxfp4, Mxfp8, Plain
from services.worker.quant.fp8_block import FORMAT as BLOCKS
from services.worker.quant.mxfp4 import FORMAT as MXFP4
from services.worker.quant.w4a16 import FORMAT as INT4
from services.worker.quant.w8a8 import FORMAT as ROWS
from services.worker.quant.w8a16 import FORMAT as INT8
from tests.services.worker.quant.loading import BINDINGS, as_if_by

FP8 = torch.float8_e4m3fn
X = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
NORM = Norm(torch.rand(256, generator=torch.Generator().manual_seed(1)) + 0.5, 1e-5)


def test_columns_in_another_order() -> None:
    order = torch.tensor([2, 0, 3, 1, 3])
    assert torch.equal(Plain(order, 3)(X[:, :3])[0], torch.cat((X[:, :3], torch.zeros(5, 1)), 1)[:, order])
    assert Plain()(X)[0] is X


def test_one_scale_for_a_step() -> None:
    numbers, scale = ByTensor(FP8, None, False, BINDINGS)(X)
    assert scale.shape == (1,) and torch.allclose(scale, X.abs().max() / 448)
    assert ((numbers.float() * scale - X).abs() <= X.abs() / 16 + float(scale)).all()
    given = torch.tensor([0.001])
    numbers, scale = ByTensor(FP8, given, True, BINDINGS)(X)
    assert scale.shape == (5, 1) and scale.unique().tolist() == given.tolist()
    assert numbers.float().abs().max() == 448, "what exceeds the checkpoint's scale is saturated"
    for each in (False, True):
        numbers, scale = ByTensor(FP8, None, each, BINDINGS)(X[:0])
        assert numbers.shape == (0, 256) and scale.shape == ((0, 1) if each else (1,))


def test_powers_of_two() -> None:
    numbers, scales = Mxfp8(FP8, BINDINGS)(X)
    assert ((decode_mxfp8(numbers, scales) - X).abs() <= X.abs() / 16 + 0.01).all()


def test_a_norm_is_fused_where_a_provider_has_it() -> None:
    assert not ByRow(FP8, BINDINGS).norms and not ByGroup(FP8, False, BINDINGS).norms
    fused = as_if_by("aiter", "norm_quantize_rows", "norm_quantize_groups", "silu_quantize_groups")
    normed = torch.nn.functional.rms_norm(X, (256,), NORM.weight, NORM.eps)
    for form in (ByRow(FP8, fused), ByGroup(FP8, False, fused)):
        assert form.norms
        for got, wanted in zip(form.normed(X, NORM), form(normed), strict=True):
            torch.testing.assert_close(got.float(), wanted.float(), rtol=0.13, atol=0.02)
    halves = torch.cat((X, X), 1)
    (got, _), (wanted, _) = (
        ByGroup(FP8, False, fused).gated(halves),
        ByGroup(FP8, False, fused)(torch.nn.functional.silu(X) * X),
    )
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0.13, atol=0.02)


def test_a_norm_in_mxfp4() -> None:
    assert not Mxfp4(BINDINGS).norms
    form = Mxfp4(as_if_by("aiter", "norm_quantize_mxfp4"))
    assert form.norms
    x, norm, eps = make_norm_mxfp4_case(256, 256).make(torch.float32)
    for got, wanted in zip(form.normed(x, Norm(norm, eps)), form(x * norm), strict=True):
        assert torch.equal(got, wanted)


def test_a_weight_is_fused_as_its_form_is() -> None:
    matrix = torch.randn(128, 256, generator=torch.Generator().manual_seed(2)) / 16
    for form, op in ((ROWS, "norm_quantize_rows"), (BLOCKS, "norm_quantize_groups")):
        codes = form.encode(matrix)
        plain = form.weight(codes, 256, None, Making(torch.float32, torch.device("cpu"), BINDINGS))
        assert plain.fused is None
        bindings = as_if_by("aiter", op, "silu_quantize_groups")
        weight = form.weight(codes, 256, None, Making(torch.float32, torch.device("cpu"), bindings))
        assert weight.fused is not None
        bias = torch.randn(128)
        normed = torch.nn.functional.rms_norm(X, (256,), NORM.weight, NORM.eps)
        wanted = plain.linear(normed, bias)
        torch.testing.assert_close(weight.fused.after_norm(X, NORM, bias), wanted, rtol=0.02, atol=0.02)
        gate, up = wanted.chunk(2, 1)
        gated = weight.fused.gated(X, NORM, bias, "silu")
        torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, rtol=0.05, atol=0.05)
        residual = torch.ones(5, 128)
        weight.fused.add_to(residual, X, None)
        torch.testing.assert_close(residual, 1 + plain.linear(X))
    assert torch.equal(plain.embed(torch.tensor([3])), plain.dequantize()[[3]])


@pytest.mark.parametrize("form", [ROWS, BLOCKS, INT4, MXFP4, INT8], ids=lambda form: form.name)
def test_norm_gate_and_residual_are_in_the_product_where_a_provider_has_that(form: CodedFormat) -> None:
    codes = form.encode(torch.randn(128, 256, generator=torch.Generator().manual_seed(2)) / 16)
    bindings = as_if_by("triton", "norm_narrow_linear", "norm_gated_narrow_linear", "add_narrow_linear")
    weight = form.weight(codes, 256, None, Making(torch.float32, torch.device("cpu"), bindings))
    assert weight.fused is not None and not getattr(weight, "takes_gate", False)
    wide, bias = form.decode(codes), torch.randn(128)
    normed = torch.nn.functional.rms_norm(X, (256,), NORM.weight, NORM.eps)
    wanted = normed @ wide.T + bias
    torch.testing.assert_close(weight.fused.after_norm(X, NORM, bias), wanted, rtol=1e-4, atol=1e-4)
    gate, up = wanted.chunk(2, 1)
    gated = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(weight.fused.gated(X, NORM, bias, "silu"), gated, rtol=1e-4, atol=1e-4)
    residual = torch.ones(5, 128)
    weight.fused.add_to(residual, X, bias)
    torch.testing.assert_close(residual, 1 + X @ wide.T + bias, rtol=1e-4, atol=1e-4)
    if form is INT4:
        shuffled = codes._replace(order=torch.randperm(256))
        apart = form.weight(shuffled, 256, None, Making(torch.float32, torch.device("cpu"), bindings))
        assert apart.fused is None, "x is put in order first"
