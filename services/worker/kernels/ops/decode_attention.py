"""All that lies between the projections of a decode step in one op: `rope_kv_write`, then `paged_attention`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.kv_write import KvScale, store_kv
from services.worker.kernels.ops.paged_attention import (
    AttentionRows,
    AttentionSpec,
    Extras,
    make_attention_case,
    paged_attention,
)
from services.worker.kernels.ops.rope_kv_write import HeadNorm, make_rope_kv_case, rope_kv_write
from services.worker.kernels.registry import Case, Tolerance, op


def make_decode_case(
    name: str,
    context: Sequence[int],
    heads: tuple[int, int, int],
    rotary_dim: int,
    normed: bool,
    extras: Extras = Extras(),  # noqa: B008
) -> Case:
    """`heads` is (query heads, KV heads, head size)."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        count, size = len(context), extras.block_tokens
        attention = make_attention_case(name, [1] * count, context, heads, extras=extras).make(dtype)
        _, k_cache, v_cache, rows, spec = attention
        if spec.kv_scale is not None:
            # scales near 1, so that tolerances of what is stored are those of numbers
            scale = KvScale(torch.tensor([0.8]), torch.tensor([0.3]))
            wide = [part.float() * old for part, old in zip((k_cache, v_cache), spec.kv_scale, strict=True)]
            k_cache, v_cache = (store_kv(part, k_cache.dtype, new) for part, new in zip(wide, scale, strict=True))
            spec = spec._replace(kv_scale=scale)
        qkv, cos, sin, _, _, _, norm, _ = make_rope_kv_case(count, *heads, rotary_dim, normed).make(dtype)
        last = torch.tensor([length - 1 for length in context], dtype=torch.int64)
        blocks = rows.tables[torch.arange(count), last // size].long()
        return qkv, (cos, sin), k_cache, v_cache, blocks * size + last % size, norm, rows, spec

    return Case(name, make)


@op(
    cases=[
        make_decode_case("alone", [257], (9, 3, 64), 64, False),
        make_decode_case("first_of_a_page", [33, 16, 17, 1], (4, 4, 32), 32, True),
        make_decode_case("ragged", [1, 700, 16, 33, 650, 5], (8, 2, 128), 128, True),
        make_decode_case("partly_turned", [90, 7], (6, 2, 20), 8, True),
        make_decode_case("head192", [70], (2, 1, 192), 64, False, Extras(table_rows=True)),
        make_decode_case("page64", [64, 200, 65], (4, 2, 64), 64, False, Extras(64, table_rows=True)),
        make_decode_case("window", [150, 7, 33], (4, 2, 64), 64, True, Extras(window=20)),
        make_decode_case("window1", [33, 1], (4, 4, 32), 32, False, Extras(window=1)),
        make_decode_case("everything", [140, 64], (16, 2, 64), 64, True, Extras(window=48, softcap=3.0, sinks=True)),
        make_decode_case("fp8", [120, 16, 1], (4, 2, 128), 128, True, Extras(fp8=True)),
        make_decode_case("empty", [], (9, 3, 64), 64, False),
    ],
    tolerances={
        torch.float32: Tolerance(1e-5, 2e-5, "order of sums, one fused multiply-add against two roundings"),
        torch.bfloat16: Tolerance(
            3e-2, 1e-1, "queries, keys and probabilities rounded to 8 bits at one place or other"
        ),
        torch.float16: Tolerance(4e-3, 1.2e-2, "queries, keys and probabilities rounded to 11 bits at other places"),
    },
    writes=("k_cache", "v_cache"),
)
def decode_attention(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    head_norm: HeadNorm | None,
    rows: AttentionRows,
    spec: AttentionSpec,
) -> Tensor:
    """Arguments as of the two ops; every row has one token, the last of its context. Returns a new [T, H, D]."""
    q = rope_kv_write.meaning(qkv, *rotation, k_cache, v_cache, slots, head_norm, spec.kv_scale)
    return paged_attention.meaning(q, k_cache, v_cache, rows, spec)
