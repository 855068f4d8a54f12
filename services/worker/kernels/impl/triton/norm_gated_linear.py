"""The first half of a gated MLP: one kernel for few rows, for many the norm's, `linear` and the gate's."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _dense, _gate, _norm
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton.linear import linear_by_rows
from services.worker.kernels.ops.norm_gated_linear import norm_gated_linear
from services.worker.kernels.registry import Impl


def norm_gated_linear_by_rows(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    outputs, inner = weight.shape
    chosen = _dense.plan("norm_gated_linear", _dense.bucket(len(x)), outputs, inner, x.dtype, x.device)
    if chosen.path == "apart":
        fused = linear_by_rows(_norm.launch(x, None, norm, eps)[0], weight, bias)
        return _gate.launch(fused, activation)
    out = torch.empty((len(x), outputs // 2), dtype=x.dtype, device=x.device)
    _dense.product(x.contiguous(), (norm, eps), weight, bias, out, chosen, activation)
    return out


IMPL = Impl(norm_gated_linear, "triton", norm_gated_linear_by_rows, needs_gpu)
AOT = _dense.aot_cases("norm_gated_linear", ((6144, 1024), (28672, 4096)))
