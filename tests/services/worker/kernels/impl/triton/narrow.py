"""How a geometry of the products with narrow weights is held against fp32 products with the widened weight."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_fused
from services.worker.kernels.impl.triton._narrow_plan import HALVED, Inputs, Narrow, Plan, product
from services.worker.kernels.ops.norm_gated_linear import norm_gated_linear
from services.worker.kernels.ops.norm_linear import norm_linear
from services.worker.kernels.ops.norm_narrow_linear import narrowed, widened
from services.worker.kernels.ops.row_scaled_linear import make_operands
from services.worker.kernels.registry import Facts, Impl


def in_16_bits(impl: Impl[Any]) -> Impl[Any]:
    """The implementation for bf16 only: other dtypes take as long, and show nothing that is not tried elsewhere."""
    return replace(impl, refuses=tried_in_bf16)


def tried_in_bf16(facts: Facts) -> str | None:
    return None if facts.dtype == torch.bfloat16 else "not tried here"


def weight_of(form: str, out: int, inner: int, device: torch.device) -> tuple[Narrow, Tensor]:
    """A weight, and the fp32 matrix that it stands for. `form`: see norm_narrow_linear.narrowed."""
    _, dense, _ = make_operands(1, inner, out)
    stored = narrowed(dense, form)
    narrow = _narrow_fused.narrow_of(*(None if part is None else part.to(device) for part in stored))  # type: ignore[arg-type]
    return narrow, widened(*stored)


def activations(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def close(got: Tensor, wanted: Tensor, halves: bool = False) -> None:
    """`halves`: products were summed in fp16, 8 at a time."""
    tolerance = (4e-3 if halves else 5e-5) if got.dtype == torch.float32 else 6e-2
    torch.testing.assert_close(got.cpu().float(), wanted.float(), rtol=tolerance, atol=tolerance)


def holds(device: torch.device, form: str, rows: int, inner: int, out: int, chosen: Plan) -> None:
    """With every prologue and epilogue."""
    dtype = activations(device) if form != "mxfp4" or chosen.block_m == 1 else torch.bfloat16
    halves = chosen.dots and form in HALVED
    dtype, of_x = (torch.float32, torch.bfloat16) if halves else (dtype, dtype)
    narrow, wide = weight_of(form, out, inner, device)
    x, _, bias = (part.to(of_x).float() for part in make_operands(rows, inner, out))
    norm = (torch.rand(inner, generator=torch.Generator().manual_seed(1)) + 0.5).to(of_x).float()
    moved = [part.to(device, of_x) for part in (x, norm, bias)]
    inputs = Inputs(moved[0], norm=(moved[1], 1e-5), bias=moved[2])
    result = torch.full((rows, out), torch.nan, dtype=dtype, device=device)
    product(inputs, narrow, result, chosen=chosen)
    close(result, norm_linear.meaning(x, norm, 1e-5, wide, bias), halves)
    result = torch.full((rows, out // 2), torch.nan, dtype=dtype, device=device)
    product(inputs, narrow, result, activation="gelu_tanh", chosen=chosen)
    close(result, norm_gated_linear.meaning(x, norm, 1e-5, wide, bias, "gelu_tanh"), halves)
    result = torch.ones((rows, out), dtype=dtype, device=device)
    product(Inputs(moved[0]), narrow, result, add=True, chosen=chosen)
    close(result, x @ wide.T + 1, halves)
