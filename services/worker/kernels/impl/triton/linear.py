"""Dense product: the kernels of `_dense` for few rows where they are faster, else torch's."""

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.impl.triton import _dense
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.linear import linear
from services.worker.kernels.registry import Impl


def linear_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outputs, inner = weight.shape
    chosen = _dense.plan("linear", _dense.bucket(len(x)), outputs, inner, x.dtype, x.device)
    if chosen.path == "apart":
        return functional.linear(x, weight, bias)
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    _dense.product(x.contiguous(), None, weight, bias, out, chosen)
    return out


IMPL = Impl(linear, "triton", linear_by_rows, needs_gpu)
AOT = _dense.aot_cases("linear", ((128, 2048),))
