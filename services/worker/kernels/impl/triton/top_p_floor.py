"""The border of top-p, by the search of `_floors`."""

from torch import Tensor

from services.worker.kernels.impl.triton._floors import aot_cases, floors
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.top_p_floor import top_p_floor
from services.worker.kernels.registry import Impl


def top_p_floor_by_search(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    return floors(logits, temperature, None, top_p, None)


IMPL = Impl(top_p_floor, "triton", top_p_floor_by_search, needs_gpu)
AOT = aot_cases("top_p_floor", "fp32", top_k=False, top_p=True, min_p=False)
