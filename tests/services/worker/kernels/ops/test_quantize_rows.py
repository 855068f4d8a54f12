import pytest
import torch

from services.worker.kernels.ops.quantize_rows import limit_of, quantize_rows, quantized

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8)


@pytest.mark.parametrize("stored", EIGHT_BITS)
def test_numbers_times_scales_are_the_input(stored: torch.dtype) -> None:
    """To half a step of the stored type: the number above is at most 1 / 8 away, of int8 one unit."""
    for dtype in quantize_rows.tolerances:
        for case in quantize_rows.cases:
            x, _ = case.make(dtype)
            numbers, scales = quantize_rows.meaning(x, stored)
            assert numbers.dtype == stored and numbers.shape == x.shape
            assert scales.dtype == torch.float32 and scales.shape == (len(x), 1)
            wide, back = x.double(), numbers.double() * scales.double()
            step = scales.double() / 2 if stored == torch.int8 else wide.abs() / 16 + scales.double() * 2.0**-10
            assert ((back - wide).abs() <= step * 1.001).all()


@pytest.mark.parametrize("stored", EIGHT_BITS)
def test_the_largest_of_a_row_is_the_largest_number(stored: torch.dtype) -> None:
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-5, 5, 7)[:, None]
    numbers, scales = quantize_rows.meaning(x, stored)
    assert (numbers.float().abs().amax(-1) == limit_of(stored)).all()
    torch.testing.assert_close(scales[:, 0] * limit_of(stored), x.abs().amax(-1))


def test_largest_numbers_of_the_types() -> None:
    assert [limit_of(stored) for stored in EIGHT_BITS] == [448.0, 240.0, 127.0]


def test_zeros_and_infinite_scales_do_not_become_nan() -> None:
    numbers, scales = quantized(torch.zeros(2, 32), torch.float8_e4m3fn)
    assert not numbers.float().any() and (scales > 0).all()
