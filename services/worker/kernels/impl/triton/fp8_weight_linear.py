"""Products with fp8 weights and wide x, by the kernels of `_narrow_plan`; many rows with the weight widened."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_ahead, _narrow_plan
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._narrow_plan import FEW, WIDE, Inputs, Narrow
from services.worker.kernels.ops.fp8_weight_linear import fp8_weight_linear
from services.worker.kernels.registry import Impl


def run(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    if out.numel():
        # the table's rows beyond FEW are about x in 8 bits
        chosen = WIDE if len(x) > FEW and x.element_size() == 2 else None
        _narrow_plan.product(Inputs(x.contiguous(), bias=bias), Narrow("rows", weight, scales), out, chosen=chosen)
    return out


IMPL = Impl(fp8_weight_linear, "triton", run, needs_gpu)
AOT = _narrow_ahead.aot_cases("rows", ((6144, 4096),), (1, 16))
