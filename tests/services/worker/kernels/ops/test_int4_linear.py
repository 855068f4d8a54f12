from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.int4_linear import encode_int4, int4_linear
from services.worker.kernels.packing.int4 import decode_int4
from tests.services.worker.kernels.ops.narrow_weights import int4_by_number


def formula(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> Tensor:
    y = x @ int4_by_number(weight, scales, zeros).T
    return y if bias is None else y + bias


def test_equals_formula(check: Any) -> None:
    check(int4_linear, formula)


def test_encoding_is_within_half_a_step() -> None:
    values = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)) + 0.3
    for symmetric in (False, True):
        numbers, scales, zeros = encode_int4(values, 64, symmetric)
        assert (zeros is None) == symmetric and scales.shape == (40, 4)
        steps = scales.repeat_interleave(64, -1)
        assert ((decode_int4(numbers, scales, zeros) - values).abs() <= 0.501 * steps).all()


def test_groups_of_zeros_stay_zero() -> None:
    for symmetric in (False, True):
        assert not decode_int4(*encode_int4(torch.zeros(2, 64), 32, symmetric)).any()
