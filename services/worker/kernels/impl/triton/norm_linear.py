"""RMS normalization and a dense product: one kernel for few rows, for many the norm's and then `linear`."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _dense, _norm
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton.linear import linear_by_plan
from services.worker.kernels.ops.norm_linear import norm_linear
from services.worker.kernels.registry import Impl


def norm_linear_by_rows(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return norm_linear_by_plan(x, norm, eps, weight, bias, _dense.plan_for("norm_linear", x, weight))


def norm_linear_by_plan(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    chosen: _dense.Plan,
    plain: _dense.Plan | None = None,
) -> Tensor:
    """`plain`: of the product itself where `chosen` is "apart"; None: as `linear` chooses."""
    if chosen.path == "apart":
        plain = plain or _dense.plan_for("linear", x, weight)
        return linear_by_plan(_norm.launch(x, None, norm, eps)[0], weight, bias, plain)
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    _dense.product(x.contiguous(), (norm, eps), weight, bias, out, chosen)
    return out


IMPL = Impl(norm_linear, "triton", norm_linear_by_rows, needs_gpu)
AOT = (
    *_dense.aot_cases("norm_linear", ((4096, 1024), (151936, 1024), (6144, 4096), (128256, 4096), (5120, 2048))),
    *_dense.aot_cases("norm_linear", ((4608, 3584),), bias=True),
)
