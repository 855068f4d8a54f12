"""The lightning indexer of sparse attention (DeepSeek-V3.2): how much each token wants each position of its context."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.kernels.ops.paged_attention import AttentionRows, make_attention_rows
from services.worker.kernels.registry import Case, Sizes, Tolerance, op
from services.worker.kernels.row_parts import by_token

MOST_TOKENS = 256  # of a case's chunks: the meaning has products of each with each key


class Extras(NamedTuple):
    """What a case has beyond bf16 pages and rows that decode. `chunks`: tokens of sequences, by index, that have more
    than one: the last ones of their contexts."""

    block_tokens: int = 16
    fp8: int = 0  # 1 for 8 bits
    chunks: tuple[int, ...] = ()
    top_k: int = 0


def make_index_case(
    context: Sequence[int],
    num_heads: int,
    head_dim: int,
    before: int,
    extras: Extras = Extras(),  # noqa: B008
) -> Case:
    """A sequence for each context, those with chunks last; `before`: numbers of a page's row before the key."""
    block_tokens, fp8, chunks, top_k = extras

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, AttentionRows, Tensor, int]:
        generator = torch.Generator().manual_seed(sum(context) + num_heads)
        needed = [-(-length // block_tokens) for length in context]
        pool = torch.randperm(sum(needed) + 3, generator=generator)
        tables = [part.tolist() for part in torch.split(pool[: sum(needed)], needed)]
        counts = [1] * (len(context) - len(chunks)) + list(chunks)
        tokens = sum(counts)
        q = torch.randn(tokens, num_heads + 2, head_dim, generator=generator).to(dtype)[:, 2:]
        weights = torch.randn(tokens, num_heads, generator=generator)
        pages = torch.randn(len(pool), block_tokens, before + head_dim, generator=generator).to(dtype)
        pages = pages.to(torch.float8_e4m3fn) if fp8 else pages
        rows = make_attention_rows(counts, context, tables, block_tokens)
        single = rows if not chunks else replace(by_token(rows, tokens), num_decode=rows.num_decode)
        return q, weights, pages, single, torch.full((tokens, max(context) + 3), 7.0), top_k

    tail = "".join(f"+{count}" for count in chunks)
    name = f"{len(context)}x{max(context)}{tail}h{num_heads}x{head_dim}b{before}p{block_tokens}{'fp8' * fp8}"
    return Case(f"{name}{f'k{top_k}' * (top_k > 0)}", make)


TOGETHER = 16  # tokens of a sequence whose products with all its keys are there at once


@op(
    cases=[
        make_index_case((70, 5), 64, 128, 64),
        make_index_case((130, 1, 33), 5, 16, 32, Extras(8, top_k=33)),
        make_index_case((40, 9), 64, 128, 64, Extras(fp8=1)),
        # chunks with and without a context before them, which share a program's tokens, and a row that decodes
        make_index_case((77, 35, 60, 19), 5, 16, 32, Extras(8, chunks=(35, 18, 2), top_k=20)),
        make_index_case((140, 9), 64, 128, 64, Extras(chunks=(17, 9))),
        make_index_case((40, 18), 32, 128, 64, Extras(fp8=1, chunks=(18,))),
    ],
    tolerances={
        torch.float32: Tolerance(1e-4, 1e-4, "order of sums"),
        torch.bfloat16: Tolerance(1e-3, 1e-3, "order of sums: products of 8 bits are exact in fp32"),
        torch.float16: Tolerance(1e-3, 1e-3, "order of sums: products of 11 bits are exact in fp32"),
    },
    writes=("scores",),
    by_value=True,
)
def index_scores(q: Tensor, weights: Tensor, pages: Tensor, rows: AttentionRows, scores: Tensor, top_k: int) -> None:
    """scores[t, position] = sum over h of weights[t, h] * relu(q[t, h] @ key), of each position in a row's context.

    What lies behind a context stays as it is, and rows whose context is at most `top_k`: they choose all of it.
    q: [T, H, D], heads of a token side by side; weights: float32 [T, H]; pages: [num_blocks, B, W], contiguous: keys
    are the last D numbers of a row; scores: float32 [T, at least the longest context], contiguous. Each row has one
    token: the first `num_decode` are of sequences of their own, others are side by side where they are of one.
    """
    head_dim, page, width = q.shape[2], rows.block_tokens, scores.shape[1]
    position = torch.arange(width, device=q.device)
    used = (position // page).clamp_(max=rows.block_tables.shape[1] - 1)
    rows_of = pages.view(-1, pages.shape[2])[:, -head_dim:]
    narrow = pages.element_size() == 1  # 8-bit floats cannot be indexed
    context = rows.context_lens[:, None]
    wanted = (position < context) & (context > top_k)
    for tokens, table in _alike(rows):
        slots = table[used].to(torch.int64) * page + position % page
        # behind every context lie no blocks of the row's
        slots = slots.masked_fill(position >= rows.context_lens[tokens].max(), 0)
        taken = (rows_of.view(torch.uint8) if narrow else rows_of)[slots]
        keys = (taken.view(pages.dtype) if narrow else taken).float()
        for first in range(tokens.start, tokens.stop, TOGETHER):
            some = slice(first, min(first + TOGETHER, tokens.stop))
            products = torch.einsum("thd,kd->thk", q[some].float(), keys).relu_()
            sums = torch.einsum("th,thk->tk", weights[some], products)
            scores[some] = torch.where(wanted[some], sums, scores[some])


def _alike(rows: AttentionRows) -> Iterator[tuple[slice, Tensor]]:
    """Tokens side by side that are of one sequence, whose keys are gathered once; and its blocks."""
    if rows.table_rows is None:
        yield from (
            (slice(row, row + 1), table) for row, table in enumerate(rows.block_tables[: len(rows.context_lens)])
        )
        return
    found, counts = torch.unique_consecutive(rows.table_rows, return_counts=True)
    first = 0
    for row, count in zip(found.tolist(), counts.tolist(), strict=True):
        yield slice(first, first + count), rows.block_tables[row]
        first += count


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """Of models that choose tokens."""
    heads = shapes.get("index_heads", 0)
    for rows in sizes.decode if heads else ():
        context = [777, *(1 + 777 * (7 * row + 1) % (777 + row) for row in range(1, min(rows, 16)))]
        before = shapes["latent_row"] - shapes["index_head_dim"]
        page, fp8 = shapes["block_tokens"], shapes.get("kv_fp8", 0)
        yield make_index_case(context, heads, shapes["index_head_dim"], before, Extras(page, fp8))
    for tokens in sizes.prompt if heads else ():
        before = shapes["latent_row"] - shapes["index_head_dim"]
        page, fp8 = shapes["block_tokens"], shapes.get("kv_fp8", 0)
        size = min(tokens, MOST_TOKENS)
        chunks = (size - size // 3, size // 3) if size > 5 else (size,)
        context = [777, chunks[0], *(333 + count for count in chunks[1:])]
        yield make_index_case(context, heads, shapes["index_head_dim"], before, Extras(page, fp8, chunks))
