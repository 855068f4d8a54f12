"""Dense product: the kernels of `_dense` for few rows where they are faster, else torch's."""

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.impl.triton import _dense
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.linear import linear
from services.worker.kernels.registry import Impl


def linear_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_by_plan(x, weight, bias, _dense.plan_for("linear", x, weight))


def linear_by_plan(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: _dense.Plan) -> Tensor:
    if chosen.path == "apart":
        return functional.linear(x, weight, bias)
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    _dense.product(x.contiguous(), None, weight, bias, out, chosen)
    return out


IMPL = Impl(linear, "triton", linear_by_rows, needs_gpu)
AOT = _dense.aot_cases("linear", ((128, 2048),))
