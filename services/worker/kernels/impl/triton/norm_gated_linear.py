"""The first half of a gated MLP: one kernel for few rows, for many the norm's, `linear` and the gate's."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _dense, _gate, _norm
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton.linear import linear_by_plan
from services.worker.kernels.ops.norm_gated_linear import norm_gated_linear
from services.worker.kernels.registry import Impl


def norm_gated_linear_by_rows(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    chosen = _dense.plan_for("norm_gated_linear", x, weight)
    return norm_gated_linear_by_plan(x, norm, eps, weight, bias, activation, chosen)


def norm_gated_linear_by_plan(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    chosen: _dense.Plan,
    plain: _dense.Plan | None = None,
) -> Tensor:
    """`plain`: of the product itself where `chosen` is "apart"; None: as `linear` chooses."""
    if chosen.path == "apart":
        plain = plain or _dense.plan_for("linear", x, weight)
        return _gate.launch(linear_by_plan(_norm.launch(x, None, norm, eps)[0], weight, bias, plain), activation)
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    _dense.product(x.contiguous(), (norm, eps), weight, bias, out, chosen, activation)
    return out


IMPL = Impl(norm_gated_linear, "triton", norm_gated_linear_by_rows, needs_gpu)
AOT = _dense.aot_cases("norm_gated_linear", ((6144, 1024), (28672, 4096)))
