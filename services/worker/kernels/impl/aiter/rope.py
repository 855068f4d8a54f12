"""Rotary embedding by AITER's rotation with one row of angles per token."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import refusal
from services.worker.kernels.impl.aiter._rotation import ROTATE, rotated
from services.worker.kernels.ops.rope import rope
from services.worker.kernels.registry import Facts, Impl


def rotated_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(x, cos, sin) if len(x) else torch.empty_like(x)


def refuses(facts: Facts) -> str | None:
    return refusal(facts, ROTATE)


IMPL = Impl(rope, "aiter", rotated_heads, refuses)
