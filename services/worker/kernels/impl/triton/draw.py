"""The captured step's token choice: greedy or a draw per row, by the two launches of `_sampling`."""

from torch import Tensor

from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._sampling import aot_cases, tokens
from services.worker.kernels.ops.draw import draw
from services.worker.kernels.registry import Impl


def draw_by_chunks(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    return tokens(logits, temperature, None, seeds, positions)


IMPL = Impl(draw, "triton", draw_by_chunks, needs_gpu)
AOT = aot_cases("draw", "bf16", greedy=False, floor=False, hot=True)
