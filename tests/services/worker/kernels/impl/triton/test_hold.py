"""The fixture that holds every kernel must itself see each kind of mistake; the interpreter must round as GPUs do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Case, Facts, Impl, Op, Tolerance
from tests.services.worker.kernels.impl.triton.hold import Holder

TOLERANCES = {dtype: Tolerance(1e-2, 1e-2, "test") for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@triton.jit
def _gate(x_ptr, y_ptr, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, EXTRA: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    column = FIRST + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * WIDTH + column, value.to(y_ptr.dtype.element_ty), mask=column < WIDTH + EXTRA)


def gated(first: int = 0, extra: int = 0, spoil: bool = False) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        width = x.shape[1] // 2
        y = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
        if len(x):
            _gate[(len(x),)](x, y, x.stride(0), width, triton.next_power_of_2(width), first, extra)
            if spoil:
                x[0, 0] += 1
        return y

    return run


def test_a_right_kernel_passes_in_all_dtypes(hold: Holder) -> None:
    hold(Impl(silu_and_mul, "triton", gated()))
    hold(Impl(silu_and_mul, "triton", gated()), strided=(0,))


def test_a_forgotten_element_is_seen(hold: Holder) -> None:
    with pytest.raises(AssertionError, match=r"silu_and_mul/1x1536/\w+ result"):
        hold(Impl(silu_and_mul, "triton", gated(first=1)))


def test_a_changed_argument_is_seen(hold: Holder) -> None:
    with pytest.raises(AssertionError, match=r"argument\.0: 1 of 3072 differ"):
        hold(Impl(silu_and_mul, "triton", gated(spoil=True)))


def test_writing_outside_is_seen(hold: Holder) -> None:
    def meaning(x: Tensor, y: Tensor) -> None:
        y.copy_(silu_and_mul.meaning(x))

    def run(x: Tensor, y: Tensor) -> None:
        _gate[(len(x),)](x, y, x.stride(0), y.shape[1], 32, 0, 1)

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        return torch.ones(3, 40, dtype=dtype), torch.zeros(3, 20, dtype=dtype)

    op = Op("outside", meaning, (Case("3x20", make),), TOLERANCES)
    with pytest.raises(AssertionError, match="writes outside"):
        hold(Impl(op, "triton", run))


def test_refusing_everything_is_no_success(hold: Holder) -> None:
    def refuses(facts: Facts) -> str | None:
        return "never"

    with pytest.raises(AssertionError, match=r"refuses every dtype|silu_and_mul: never"):
        hold(Impl(silu_and_mul, "triton", gated(), refuses))


@triton.jit
def _cast(x_ptr, y_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, N)
    tl.store(y_ptr + place, tl.load(x_ptr + place).to(y_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_casts_round_to_nearest_even(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1024, generator=generator) * torch.logspace(-3, 2, 1024)
    x[:4] = torch.tensor([127.9, -0.0, 1.00390625, 240.0])
    back = torch.empty(1024, device=device)
    narrow = torch.empty(1024, dtype=dtype, device=device)
    _cast[(1,)](x.to(device), narrow, 1024)
    _cast[(1,)](narrow, back, 1024)
    wanted = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    assert torch.equal(narrow.cpu().float(), wanted.float())
    assert torch.equal(back.cpu(), wanted.float())


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + rows * N + columns), tl.load(b_ptr + rows * N + columns)
    tl.store(c_ptr + rows * N + columns, tl.dot(a, b * 2.0 + a))


def test_bf16_arithmetic_and_products(device: torch.device) -> None:
    a, b = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(1)).bfloat16().to(device).unbind(0)
    c = torch.empty(32, 32, device=device)
    _product[(1,)](a, b, c, 32)
    torch.testing.assert_close(c, a.float() @ (b * 2 + a).float(), rtol=2e-2, atol=5e-2)
