"""A dense product added onto the residual stream in the product's own last step, by our kernels or torch's."""

from torch import Tensor

from services.worker.kernels.impl.triton import _dense
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.add_linear import add_linear
from services.worker.kernels.registry import Impl


def add_linear_by_rows(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    add_linear_by_plan(residual, x, weight, bias, _dense.plan_for("add_linear", x, weight))


def add_linear_by_plan(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, chosen: _dense.Plan) -> None:
    if chosen.path == "apart":
        if bias is not None:
            residual.add_(bias)
        residual.addmm_(x, weight.t())
    else:
        _dense.product(x.contiguous(), None, weight, bias, residual, chosen, add=True)


IMPL = Impl(add_linear, "triton", add_linear_by_rows, needs_gpu)
AOT = (
    *_dense.aot_cases("add_linear", ((1024, 2048), (1024, 3072), (4096, 4096), (4096, 14336), (2048, 4096))),
    *_dense.aot_cases("add_linear", ((4096, 14336),), parts=4),
)
