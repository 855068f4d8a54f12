"""Multi-head latent attention (DeepSeek-V2) on the paged cache, its up-projections absorbed: of rows with few tokens.

All heads share one latent and one rotated key per position: keys are both, values the latent. The torch meaning is
grouped-query attention with one KV head, whose keys and values are the pages.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.kv_write import KvScale
from services.worker.kernels.ops.paged_attention import (
    AttentionRows,
    AttentionSpec,
    make_attention_rows,
    paged_attention,
)
from services.worker.kernels.registry import Case, Sizes, Tolerance, op

MAX_VERIFY = 4  # tokens of a row: one, and up to three drafts to verify
LATENT, ROPE = 512, 64  # of all published models

MLA_TOLERANCES = {
    torch.float32: Tolerance(1e-4, 1e-5, "order of sums, online softmax"),
    torch.bfloat16: Tolerance(2e-2, 1e-2, "probabilities rounded to 8 bits, and the result"),
    torch.float16: Tolerance(3e-3, 2e-3, "probabilities rounded to 11 bits, and the result"),
}


def make_mla_case(
    queries: Sequence[int],
    context: Sequence[int],
    num_heads: int,
    sizes: tuple[int, int] = (LATENT, ROPE),
    block_tokens: int = 16,
    more: int = 0,
    table_rows: bool = False,
    fp8: int = 0,
) -> Case:
    """Rows with so many tokens and so many cached positions, in scattered blocks. `more`: numbers of a page's row that
    are none of attention's; `fp8`: 1 for pages of 8 bits."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, AttentionRows, float]:
        generator = torch.Generator().manual_seed(sum(context) + num_heads)
        latent, rope = sizes
        needed = [-(-length // block_tokens) for length in context]
        pool = torch.randperm(sum(needed) + 3, generator=generator)
        tables = [part.tolist() for part in torch.split(pool[: sum(needed)], needed)] if needed else []
        q = torch.randn(sum(queries), num_heads, latent + rope, generator=generator).to(dtype)
        pages = torch.randn(len(pool), block_tokens, latent + rope + more, generator=generator).to(dtype)
        pages = pages.to(torch.float8_e4m3fn) if fp8 else pages
        rows = make_attention_rows(queries, context, tables, block_tokens)
        if table_rows:
            places = torch.randperm(len(queries) + 2, generator=generator)[: len(queries)]
            scattered = torch.zeros(len(queries) + 2, rows.block_tables.shape[1], dtype=torch.int32)
            scattered[places] = rows.block_tables
            rows = replace(rows, block_tables=scattered, table_rows=places.to(torch.int32))
        # a view of heads by turns, as a batched product leaves it, and one of whole queries
        latents = q[..., :latent].transpose(0, 1).contiguous().transpose(0, 1)
        return latents, q[..., latent:], pages, rows, 192**-0.5

    odd = "" if sizes == (LATENT, ROPE) else f"d{sizes[0]}+{sizes[1]}"
    odd += (f"b{block_tokens}" if block_tokens != 16 else "") + (f"m{more}" if more else "")
    most = f"{len(queries)}x{max(queries, default=0)}x{max(context, default=0)}"
    return Case(f"{most}h{num_heads}{odd}{'r' if table_rows else ''}{'fp8' * fp8}", make)


def latent_attention(q_latent: Tensor, q_rope: Tensor, pages: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    latent = q_latent.shape[2]
    q = torch.cat((q_latent, q_rope), -1)
    # what else lies in a row is multiplied by zero
    q = functional.pad(q, (0, pages.shape[2] - q.shape[2]))
    keys = pages.unsqueeze(2)
    one = torch.ones(1, device=q.device) if pages.element_size() == 1 else None
    spec = AttentionSpec(scale, kv_scale=None if one is None else KvScale(one, one))
    return paged_attention.meaning(q, keys, keys, rows, spec)[..., :latent].contiguous()


# of no published model: what else pages may be; AITER has no kernels for them
SMALL: tuple[Any, ...] = (
    ((1, 1), (130, 20), 6, (24, 8), 8, 16),
    ((1, 1, 3), (70, 7, 9), 8, (64, 16), 1),
    ((1, 1), (70, 9), 16, (64, 16), 16, 16, True, 1),
    ((), (), 16, (64, 16)),
)


@op(
    cases=[
        make_mla_case((1,), (77,), 16),
        make_mla_case((1, 1, 1), (5, 40, 1), 128, table_rows=True),
        make_mla_case((2, 4, 1), (9, 40, 33), 20),
        *(make_mla_case(*small) for small in SMALL),
    ],
    tolerances=MLA_TOLERANCES,
)
def mla_decode(q_latent: Tensor, q_rope: Tensor, pages: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    """softmax((q_latent @ latents.T + q_rope @ keys.T) * scale) @ latents, causal. Returns a new [T, H, L], contiguous.

    q_latent: [T, H, L], queries by the absorbed up-projection of keys; q_rope: [T, H, R], rotated; last dimensions
    dense. pages: [num_blocks, B, W], contiguous, W >= L + R: latents, rotated keys, and what is no part of it; all
    finite; 8 bits are read as they are. Rows have at most MAX_VERIFY tokens.
    """
    return latent_attention(q_latent, q_rope, pages, rows, scale)


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """Of models with latent attention."""
    for rows in sizes.decode if shapes.get("kv_lora_rank") else ():
        yield latent_case(shapes, [1] * rows, [777, *(1 + 777 * (7 * row + 1) % (777 + row) for row in range(1, rows))])


def latent_case(shapes: Mapping[str, int], queries: Sequence[int], context: Sequence[int]) -> Case:
    latent, rope = shapes["kv_lora_rank"], shapes["qk_rope_head_dim"]
    more = shapes["latent_row"] - latent - rope
    sizes, fp8 = (latent, rope), shapes.get("kv_fp8", 0)
    return make_mla_case(queries, context, shapes["num_heads"], sizes, shapes["block_tokens"], more, fp8=fp8)
