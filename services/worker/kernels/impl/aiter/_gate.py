"""AITER's gates of an MLP, and the one choice that they need."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import _triton
from services.worker.kernels.impl.aiter._host import Function
from services.worker.kernels.ops.gelu_and_mul import gelu_and_mul
from services.worker.kernels.ops.silu_and_mul import silu_and_mul

SILU = Function("aiter:silu_and_mul", needs=("out", "input"), twin=_triton.GATE)
GELU = Function("aiter:gelu_tanh_and_mul", needs=("out", "input"))
VECTOR = 8  # numbers that a lane of AITER's kernel writes at once, also beyond the end of a row


def gated(x: Tensor, activation: str) -> Tensor:
    """activation(x[:, :I]) * x[:, I:]. x: [T, 2I]; activation: "silu" or "gelu_tanh"; returns a new [T, I]."""
    width = x.shape[-1] // 2
    if width % VECTOR:
        return {"silu": silu_and_mul, "gelu_tanh": gelu_and_mul}[activation].meaning(x).contiguous()
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    if len(x):
        {"silu": SILU, "gelu_tanh": GELU}[activation](out=out, input=x.contiguous())
    return out
