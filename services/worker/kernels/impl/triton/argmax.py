"""Greedy tokens, by the two launches of `_sampling`."""

from torch import Tensor

from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._sampling import aot_cases, tokens
from services.worker.kernels.ops.argmax import argmax
from services.worker.kernels.registry import Impl


def argmax_by_chunks(logits: Tensor) -> Tensor:
    return tokens(logits, None, None, None, None)


IMPL = Impl(argmax, "triton", argmax_by_chunks, needs_gpu)
AOT = aot_cases("argmax", "bf16", greedy=True, floor=False, hot=False)
