"""Products with weights of 8 and 4 bits together with what surrounds them in a layer. Called by three ops' files.

Few rows take it all in one launch, with x as wide as it is: at 64 rows the weight's bytes are still what counts. More
rows are normed, and rounded where their form says so (unless the weight is widened), by kernels of their own.
"""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _gate, _narrow_plan, _quantize
from services.worker.kernels.impl.triton._narrow_plan import FEW, NORMED, Inputs, Narrow
from services.worker.kernels.ops.norm_narrow_linear import form_of

LEAST_GROUP = {"int4": 32, "int8": 16}  # columns: fewer are no step of a matrix unit


def narrow_of(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Narrow:
    form, inner = form_of(weight, scales), weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)
    group = {"rows": 0, "blocks": 128}.get(form, 0) or inner // scales.shape[1]
    return Narrow(form, weight, scales, zeros, group)


def few_of(narrow: Narrow) -> int:
    """Rows up to which x stays wide. More of forms made for x in 8 bits go into the unit as they are: widening takes
    five instructions a number, and wide x twice the weight's bytes for each 64 outputs.
    """
    return NORMED if narrow.form in ("rows", "blocks") else FEW


def suits(narrow: Narrow, x: Tensor) -> bool:
    """Whether a kernel takes it; else the op's meaning stands in."""
    if narrow.form == "mxfp4" and x.dtype == torch.float32 and len(x) > 1:
        return False  # no matrix unit takes it with fp32
    return narrow.group % LEAST_GROUP.get(narrow.form, 1) == 0


def entered(x: Tensor, norm: tuple[Tensor, float] | None, narrow: Narrow, bias: Tensor | None) -> Inputs:
    """x as a product reads it: rounded, with its norm, or as it is."""
    x = x.contiguous()
    if len(x) > few_of(narrow) and narrow.form in ("rows", "blocks") and not _narrow_plan.widens(narrow, x):
        group = 128 if narrow.form == "blocks" else 0
        numbers, scales, _ = _quantize.launch(x, narrow.weight.dtype, group, norm=norm)
        return Inputs(numbers, scales, bias=bias)
    return Inputs(x, norm=norm, bias=bias)


def after_norm(
    x: Tensor, norm: tuple[Tensor, float], narrow: Narrow, bias: Tensor | None, activation: str = ""
) -> Tensor:
    outputs = narrow.shape[0]
    inputs = entered(x, norm, narrow, bias)
    apart = bool(activation) and len(x) > FEW
    out = torch.empty((len(x), outputs // 2 if activation and not apart else outputs), dtype=x.dtype, device=x.device)
    if out.numel():
        _narrow_plan.product(inputs, narrow, out, activation="" if apart else activation)
    return _gate.launch(out, activation) if apart else out


def add_to(residual: Tensor, x: Tensor, narrow: Narrow, bias: Tensor | None) -> None:
    if residual.numel():
        _narrow_plan.product(entered(x, None, narrow, bias), narrow, residual, add=True)
