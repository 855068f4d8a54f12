"""The borders of top-k, top-p and min-p of all rows together: by counting logits of 16 bits, else by a search."""

from torch import Tensor

from services.worker.kernels.impl.triton import _value_counts
from services.worker.kernels.impl.triton._floors import aot_cases, floors
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.keep_floor import keep_floor
from services.worker.kernels.registry import Impl


def keep_floor_by_search(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, max_k: int
) -> Tensor:
    return floors(logits, temperature, top_k, top_p, min_p)


IMPL = Impl(keep_floor, "triton", keep_floor_by_search, needs_gpu)
AOT = (
    *aot_cases("keep_floor", "bf16", top_k=True, top_p=True, min_p=True, known=True),
    *_value_counts.aot_cases("bf16"),
)
