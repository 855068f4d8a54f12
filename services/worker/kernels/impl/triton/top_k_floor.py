"""The border of top-k, and of top-p within it, by the search of `_floors`."""

from torch import Tensor

from services.worker.kernels.impl.triton._floors import aot_cases, floors
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.top_k_floor import top_k_floor
from services.worker.kernels.registry import Impl


def top_k_floor_by_search(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, max_k: int) -> Tensor:
    return floors(logits, temperature, top_k, top_p, None)


IMPL = Impl(top_k_floor, "triton", top_k_floor_by_search, needs_gpu)
AOT = aot_cases("top_k_floor", "fp32", top_k=True, top_p=True, min_p=False)
