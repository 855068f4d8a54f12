"""The two ops one after the other: on a CPU a launch costs little, and the new keys are in a cache anyway."""

from torch import Tensor

from services.worker.kernels.impl.numba import paged_attention as attention
from services.worker.kernels.impl.numba import rope_kv_write as rotary
from services.worker.kernels.ops.decode_attention import decode_attention
from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec
from services.worker.kernels.ops.rope_kv_write import HeadNorm
from services.worker.kernels.registry import Facts, Impl


def decode_attention_rows(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    head_norm: HeadNorm | None,
    rows: AttentionRows,
    spec: AttentionSpec,
) -> Tensor:
    q = rotary.rope_kv_write_rows(qkv, *rotation, k_cache, v_cache, slots, head_norm, None)
    return attention.paged_attention_decode(q, k_cache, v_cache, rows, spec)


def refuses(facts: Facts) -> str | None:
    return rotary.refuses(facts) or attention.refuses(facts)


IMPL = Impl(decode_attention, "numba", decode_attention_rows, refuses)
