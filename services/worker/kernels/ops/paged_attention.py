"""Causal grouped-query attention of a mixed batch against the paged KV cache, straight from the block tables.

The torch meaning reads the tables on the host once per step (`AttentionRows.groups`), because that choice of views and
gathers serves every layer. Decode rows of similar length share one call; a row whose blocks are one run is a view.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.registry import Case, Tolerance, op

ALONE = 512  # tokens: from here on gathering a row costs more than a call of its own that reads it in place


@dataclass(frozen=True)
class Group:
    """Rows that one attention call serves: either decode rows (one token each), or one row with more tokens."""

    tokens: slice | Tensor  # of the step's T tokens: a range, or int64 [G]
    context: int  # KV positions read, padded for the shorter rows
    run: int  # first block, if the row's blocks are one run, else -1
    blocks: Tensor | None  # int64 [G * blocks per row], if gathered
    mask: Tensor | None  # float32, 0 or -inf: [G, 1, 1, context] of decode rows, [tokens, context] of a chunk
    is_chunk: bool  # causal; without a mask it is a whole prompt
    num_rows: int


@dataclass(frozen=True)
class AttentionRows:
    """Which tokens belong to which row, and where the rows' KV lies. Row j's tokens are the last of its context."""

    query_starts: Tensor  # int32 [R + 1]: row j has tokens query_starts[j] .. query_starts[j + 1] - 1
    context_lens: Tensor  # int32 [R]: KV length including this step's tokens, at least the row's tokens
    block_tables: Tensor  # int32 [R, M]: only the first ceil(context / B) entries of a row count
    block_tokens: int
    max_query: int
    max_context: int

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The torch meaning's plan, made at first use (off a CPU this waits for the device)."""
        starts, context = self.query_starts.cpu().numpy(), self.context_lens.cpu().numpy()
        tables = self.block_tables.cpu().numpy()
        counts = np.diff(starts)
        decode = np.flatnonzero(counts == 1)
        long = [
            row for row in decode[context[decode] >= ALONE].tolist() if self._run_of(tables, row, context[row]) >= 0
        ]
        parts = [np.array([row]) for row in long]
        if len(long) < len(decode):
            parts += _similar(context, np.setdiff1d(decode, long) if long else decode)
        groups = [self._decode_group(rows, starts, context, tables) for rows in parts]
        return (*groups, *self.chunk_groups)

    @cached_property
    def chunk_groups(self) -> tuple[Group, ...]:
        """The part of `groups` for rows with more than one token."""
        starts, context = self.query_starts.cpu().numpy(), self.context_lens.cpu().numpy()
        tables = self.block_tables.cpu().numpy()
        rows = np.flatnonzero(np.diff(starts) > 1).tolist()
        return tuple(self._lone_group(row, starts, context, tables) for row in rows)

    def _run_of(self, tables: npt.NDArray[np.int32], row: int, length: int) -> int:
        """The first block if the row's blocks follow one another, else -1."""
        last = -(-length // self.block_tokens) - 1
        first = int(tables[row, 0])
        # the ends tell most of the time
        if tables[row, last] != first + last:
            return -1
        return first if bool((np.diff(tables[row, : last + 1]) == 1).all()) else -1

    def _decode_group(
        self,
        rows: npt.NDArray[np.intp],
        starts: npt.NDArray[np.int32],
        context: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
    ) -> Group:
        if len(rows) == 1:
            return self._lone_group(int(rows[0]), starts, context, tables)
        lens, first = context[rows], starts[rows]
        width = -(-int(lens.max()) // self.block_tokens)
        ordered = bool((np.diff(first) == 1).all())
        tokens = slice(int(first[0]), int(first[0]) + len(rows)) if ordered else self._index(first)
        pages = tables[rows, :width].copy()
        # a short row's table is padded with its own first block, whose content is finite
        own = -(-lens[:, None] // self.block_tokens) > np.arange(width)
        pages = np.where(own, pages, pages[:, :1])
        mask = None
        if int(lens.min()) != width * self.block_tokens:
            hidden = np.where(np.arange(width * self.block_tokens) < lens[:, None], np.float32(0), -np.float32(np.inf))
            mask = torch.from_numpy(hidden).to(self.query_starts.device)[:, None, None, :]
        return Group(tokens, width * self.block_tokens, -1, self._index(pages.reshape(-1)), mask, False, len(rows))

    def _lone_group(
        self,
        row: int,
        starts: npt.NDArray[np.int32],
        context: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
    ) -> Group:
        """One row, with one token or more."""
        tokens, length = slice(int(starts[row]), int(starts[row + 1])), int(context[row])
        run = self._run_of(tables, row, length)
        blocks = None if run >= 0 else self._index(tables[row, : -(-length // self.block_tokens)])
        count = tokens.stop - tokens.start
        mask = None
        if 1 < count < length:
            hidden = torch.full((count, length), -torch.inf, device=self.query_starts.device)
            mask = hidden.triu_(length - count + 1)
        return Group(tokens, length, run, blocks, mask, count > 1, 1)

    def _index(self, values: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.query_starts.device)


def _similar(context: npt.NDArray[np.int32], rows: npt.NDArray[np.intp]) -> list[npt.NDArray[np.intp]]:
    """Splits decode rows so that padding to the longest of a part costs at most a quarter of what it reads."""
    if not len(rows):
        return []
    if int(context[rows].min()) * 4 + 128 >= int(context[rows].max()) * 3:
        return [rows]
    order = rows[np.argsort(-context[rows], kind="stable")]
    parts, start = [], 0
    lens = context[order].tolist()
    for end in range(1, len(order) + 1):
        if end == len(order) or lens[end] * 4 + 128 < lens[start] * 3:
            parts.append(np.sort(order[start:end]))
            start = end
    return parts


def make_attention_rows(
    counts: Sequence[int], context: Sequence[int], tables: Sequence[Sequence[int]], block_tokens: int
) -> AttentionRows:
    """From plain numbers; for cases, tests and benchmarks."""
    width = max((len(table) for table in tables), default=0)
    padded = [list(table) + [0] * (width - len(table)) for table in tables]
    return AttentionRows(
        query_starts=torch.tensor([0, *np.cumsum(counts, dtype=np.int64).tolist()], dtype=torch.int32),
        context_lens=torch.tensor(context, dtype=torch.int32),
        block_tables=torch.tensor(padded, dtype=torch.int32).view(len(tables), width),
        block_tokens=block_tokens,
        max_query=max(counts, default=0),
        max_context=max(context, default=0),
    )


def make_attention_case(
    name: str, counts: Sequence[int], context: Sequence[int], heads: tuple[int, int, int], runs: bool = False
) -> Case:
    """`heads` is (query heads, KV heads, head size); blocks of 16 tokens, scattered unless `runs`."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, AttentionRows, float]:
        generator = torch.Generator().manual_seed(sum(context))
        num_heads, num_kv_heads, head_dim = heads
        needed = [-(-length // 16) for length in context]
        pool = torch.arange(sum(needed)) if runs else torch.randperm(sum(needed) + 3, generator=generator)
        tables = [part.tolist() for part in torch.split(pool[: sum(needed)], needed)] if needed else []
        q = torch.randn(sum(counts), num_heads, head_dim, generator=generator).to(dtype)
        cache = torch.randn(2, len(pool), 16, num_kv_heads, head_dim, generator=generator).to(dtype)
        return q, cache[0], cache[1], make_attention_rows(counts, context, tables, 16), head_dim**-0.5

    return Case(name, make)


@op(
    cases=[
        make_attention_case("decode1", [1], [257], (9, 3, 64)),
        make_attention_case("decode1_run", [1], [40], (9, 3, 64), runs=True),
        make_attention_case("decode_even", [1] * 4, [32] * 4, (4, 4, 32)),
        make_attention_case("decode_ragged", [1] * 6, [1, 700, 16, 33, 650, 5], (8, 2, 64)),
        make_attention_case("prompts", [5, 16, 40], [5, 16, 40], (9, 3, 64), runs=True),
        make_attention_case("chunks", [16, 7], [300, 8], (8, 1, 128)),
        make_attention_case("mixed", [1, 30, 1, 1, 9], [90, 30, 17, 64, 200], (6, 2, 20)),
        make_attention_case("empty", [], [], (9, 3, 64)),
    ],
    tolerances={
        torch.float32: Tolerance(1e-5, 5e-6, "order of sums over the context"),
        torch.bfloat16: Tolerance(1.6e-2, 2e-2, "probabilities rounded to 8 bits before the second product, or not"),
        torch.float16: Tolerance(2e-3, 4e-3, "probabilities rounded to 11 bits before the second product, or not"),
    },
)
def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    """softmax(q k^T * scale) v over each row's own context, causal. Query head h reads KV head h * K // H.

    q: [T, H, D], last dimension dense; k_cache, v_cache: [num_blocks, B, K, D]; returns a new contiguous [T, H, D].
    Masked positions of read blocks must hold finite numbers.
    """
    groups = rows.groups
    if len(groups) == 1:
        return attend(q, k_cache, v_cache, groups[0], scale).contiguous()
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for group in groups:
        result[group.tokens] = attend(q[group.tokens], k_cache, v_cache, group, scale)
    return result


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, group: Group, scale: float) -> Tensor:
    """q: the group's tokens [G, H, D]; returns [G, H, D]."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    share = q.shape[1] // num_kv_heads
    if group.blocks is None:
        # the layout of a view of one row, made in one call each
        size = (1, num_kv_heads, group.context, head_dim)
        stride = (0, head_dim, num_kv_heads * head_dim, 1)
        first = group.run * k_cache.stride(0)
        k = k_cache.as_strided(size, stride, k_cache.storage_offset() + first)
        v = v_cache.as_strided(size, stride, v_cache.storage_offset() + first)
    else:
        padded = group.blocks.shape[0] // group.num_rows * k_cache.shape[1]
        k = k_cache.index_select(0, group.blocks).view(-1, padded, num_kv_heads, head_dim)
        v = v_cache.index_select(0, group.blocks).view(-1, padded, num_kv_heads, head_dim)
        k, v = k[:, : group.context].transpose(1, 2), v[:, : group.context].transpose(1, 2)
    mask = None if group.mask is None else group.mask.to(q.dtype)
    if group.is_chunk:
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=share > 1,
        )
        return out.squeeze(0).transpose(0, 1)
    # the query heads of one KV head are its query positions, so that its keys are read once
    out = functional.scaled_dot_product_attention(
        q.view(group.num_rows, num_kv_heads, share, head_dim), k, v, attn_mask=mask, scale=scale
    )
    return out.flatten(1, 2)
