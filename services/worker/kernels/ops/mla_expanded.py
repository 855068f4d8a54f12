"""Multi-head latent attention of prompts and chunks, un-absorbed: on keys and values that were made of the latents.

Rows lie one behind the other, so that nothing is paged. The rotated key is one for all heads.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.registry import Case, Sizes, Tolerance, op


def make_expanded_case(
    queries: Sequence[int], context: Sequence[int], num_heads: int, sizes: tuple[int, int, int]
) -> Case:
    """`sizes`: of a head's plain key, of the rotated key, of a head's value."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, float]:
        nope, rope, value = sizes
        generator = torch.Generator().manual_seed(sum(context) + num_heads)
        q = torch.randn(sum(queries), num_heads + 1, nope + rope, generator=generator).to(dtype)[:, :num_heads]
        kv = torch.randn(sum(context), num_heads, nope + value, generator=generator).to(dtype)
        keys = torch.randn(sum(context), rope + 8, generator=generator).to(dtype)[:, 8:]
        starts = [torch.tensor((0, *counts)).cumsum(0).to(torch.int32) for counts in (queries, context)]
        return q, kv, keys, *starts, max(queries, default=0), (nope + rope) ** -0.5

    return Case(f"{len(queries)}x{max(queries, default=0)}x{max(context, default=0)}h{num_heads}d{sizes}", make)


@op(
    cases=[
        make_expanded_case((20,), (20,), 4, (128, 64, 128)),
        make_expanded_case((7, 30), (100, 31), 2, (128, 64, 128)),
        make_expanded_case((150, 1, 9), (290, 17, 9), 3, (12, 8, 10)),
        make_expanded_case((33,), (64,), 2, (192, 64, 256)),
    ],
    tolerances={
        torch.float32: Tolerance(1e-4, 1e-5, "order of sums, online softmax"),
        torch.bfloat16: Tolerance(2e-2, 2e-2, "probabilities rounded to 8 bits, and the result"),
        torch.float16: Tolerance(3e-3, 3e-3, "probabilities rounded to 11 bits, and the result"),
    },
    by_value=True,
)
def mla_expanded(
    q: Tensor, kv: Tensor, k_rope: Tensor, query_starts: Tensor, kv_starts: Tensor, max_query: int, scale: float
) -> Tensor:
    """softmax((q[..., :N] @ kv[..., :N].T + q[..., N:] @ k_rope.T) * scale) @ kv[..., N:], causal: [T, H, V], dense.

    q: [T, H, N + R]; kv: [S, H, N + V], contiguous; k_rope: [S, R]; last dimensions dense. Row j has tokens
    query_starts[j] to query_starts[j + 1] - 1 (int32 [rows + 1]), the last of its positions kv_starts[j] to
    kv_starts[j + 1] - 1; `max_query`: the most tokens of a row.
    """
    rope = k_rope.shape[1]
    nope = q.shape[2] - rope
    out = q.new_empty(*q.shape[:2], kv.shape[2] - nope)
    bounds, ends = query_starts.tolist(), kv_starts.tolist()
    for first, last, begin, end in zip(bounds, bounds[1:], ends, ends[1:], strict=False):
        keys = torch.cat((kv[begin:end, :, :nope], k_rope[begin:end, None].expand(-1, kv.shape[1], -1)), -1)
        count, length = last - first, end - begin
        mask = torch.ones(count, length, dtype=torch.bool, device=q.device).tril_(length - count)
        attended = functional.scaled_dot_product_attention(
            q[first:last].transpose(0, 1),
            keys.transpose(0, 1),
            kv[begin:end, :, nope:].transpose(0, 1),
            attn_mask=mask,
            scale=scale,
        )
        out[first:last] = attended.transpose(0, 1)
    return out


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """Of models with latent attention, for some heads: those of a long context go in groups, too."""
    for tokens in sizes.prompt if shapes.get("kv_lora_rank") else ():
        dims = shapes["qk_nope_head_dim"], shapes["qk_rope_head_dim"], shapes["v_head_dim"]
        yield make_expanded_case([tokens, 3], [tokens + 777, 3], min(shapes["num_heads"], 8), dims)
