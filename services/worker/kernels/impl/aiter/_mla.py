"""How AITER's latent attention is called: which numbers of heads it has kernels for, and the cache in pages of one.

Kernels are listed in AITER by heads and tokens per row. Others are refused there when a step runs, or wrong without a
word (ROCm/aiter#5679: 16 heads and 8 tokens on gfx942), so heads are padded here and long rows are not asked for.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.mla_decode import LATENT, ROPE

SIXTEEN_QUERIES = (1, 4)  # tokens per row that kernels of 16 heads have on both architectures
WIDER = (32, 64, 128)  # heads whose kernels take any
WIDER_ONCE = (128,)  # and in older releases


def padded_heads(num_heads: int, max_query: int, wider: Sequence[int] = WIDER) -> int | None:
    """The number of heads to call with, or None where there are too many."""
    if num_heads <= 16 and max_query in SIXTEEN_QUERIES:
        return 16
    return next((heads for heads in wider if heads >= num_heads), None)


def padded(q: Tensor, num_heads: int) -> Tensor:
    """q with heads of zeros behind its own; contiguous."""
    return functional.pad(q, (0, 0, 0, num_heads - q.shape[1])).contiguous()


def paged(cache: Tensor) -> Tensor:
    """[S, D] as pages of one token and one head; no copy."""
    return cache.view(len(cache), 1, 1, cache.shape[1])


def refuses_latent(shapes: Mapping[str, int]) -> str | None:
    latent, rope = shapes.get("kv_lora_rank", LATENT), shapes.get("qk_rope_head_dim", ROPE)
    if (latent, rope) != (LATENT, ROPE):
        return f"latents of {LATENT} and {ROPE} numbers, not of {latent} and {rope}"
    return None
