"""How a geometry of the dense products is held against the ops' meanings."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _dense
from services.worker.kernels.impl.triton._dense import Plan
from services.worker.kernels.ops.add_linear import add_linear
from services.worker.kernels.ops.norm_gated_linear import norm_gated_linear
from services.worker.kernels.ops.norm_linear import norm_linear


def arguments(device: torch.device, rows: int, inner: int, out: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, norm, weight, bias; fp32 under the interpreter, where sums are exact enough to tell geometries apart."""
    generator = torch.Generator().manual_seed(rows + inner)
    x = torch.randn(rows, inner, generator=generator)
    norm = torch.rand(inner, generator=generator) + 0.5
    weight = torch.randn(out, inner, generator=generator) / inner**0.5
    bias = torch.randn(out, generator=generator)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x, norm, weight, bias = (t.to(device, dtype) for t in (x, norm, weight, bias))
    return x, norm, weight, bias


def close(got: Tensor, wanted: Tensor) -> None:
    tolerance = 5e-5 if got.dtype == torch.float32 else 6e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def holds(device: torch.device, rows: int, inner: int, out: int, chosen: Plan) -> None:
    x, norm, weight, bias = arguments(device, rows, inner, out)
    result = torch.full((rows, out), torch.nan, dtype=x.dtype, device=device)
    _dense.product(x, (norm, 1e-5), weight, bias, result, chosen)
    close(result, norm_linear.meaning(x, norm, 1e-5, weight, bias))
    result = torch.full((rows, out // 2), torch.nan, dtype=x.dtype, device=device)
    _dense.product(x, (norm, 1e-5), weight, bias, result, chosen, "gelu_tanh")
    close(result, norm_gated_linear.meaning(x, norm, 1e-5, weight, bias, "gelu_tanh"))
    result, wanted = bias.expand(rows, out).clone(), bias.expand(rows, out).clone()
    add_linear.meaning(wanted, x, weight, None)
    _dense.product(x, None, weight, None, result, chosen, add=True)
    close(result, wanted)
    if chosen.parts > 1:
        assert not _dense.workspace(x.device)[1].any(), "counters are zero again"
