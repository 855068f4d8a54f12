"""Keys and values into their pages by AITER."""

from torch import Tensor

from services.worker.kernels.impl.aiter._pages import layout_of, refuses_writing, write
from services.worker.kernels.ops.kv_write import KvScale, kv_write
from services.worker.kernels.registry import Impl


def write_pages(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, kv_scale: KvScale | None
) -> None:
    if len(k):
        write(k, v, k_cache, v_cache, slots, kv_scale)


IMPL = Impl(kv_write, "aiter", write_pages, refuses_writing, layout_of)
