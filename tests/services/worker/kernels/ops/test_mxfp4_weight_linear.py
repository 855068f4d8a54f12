from typing import Any

from torch import Tensor

from services.worker.kernels.ops.mxfp4_weight_linear import mxfp4_weight_linear
from tests.services.worker.kernels.ops.narrow_weights import mxfp4_by_number


def formula(x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ mxfp4_by_number(weight, weight_scales).T
    return y if bias is None else y + bias


def test_equals_formula(check: Any) -> None:
    check(mxfp4_weight_linear, formula)
