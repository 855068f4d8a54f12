"""Draws among the tokens at or above each row's floor, by the two launches of `_sampling`."""

from torch import Tensor

from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._sampling import aot_cases, tokens
from services.worker.kernels.ops.sample import sample
from services.worker.kernels.registry import Impl


def sample_by_chunks(logits: Tensor, temperature: Tensor, floor: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    return tokens(logits, temperature, floor, seeds, positions)


IMPL = Impl(sample, "triton", sample_by_chunks, needs_gpu)
AOT = aot_cases("sample", "fp32", greedy=False, floor=True, hot=False)
