"""Causal grouped-query attention of a mixed batch against the paged KV cache, straight from the block tables.

Optional: sliding window, soft cap on scores, attention sinks, 8-bit keys and values. The torch meaning reads the
tables on the host once per step (`AttentionRows.groups`), because that choice of views and gathers serves every layer.
Decode rows of similar length share one call; a row whose blocks are one run is a view.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.draft_entries import DraftEntries
from services.worker.kernels.ops.kv_write import KvScale, own_scales, store_kv
from services.worker.kernels.registry import Case, Tolerance, op

ALONE = 512  # tokens: from here on gathering a row costs more than a call of its own that reads it in place


class AttentionSpec(NamedTuple):
    """What a layer's attention is, apart from its inputs."""

    scale: float
    window: int = 0  # a token sees itself and the window - 1 before it; 0: all before it
    softcap: float = 0.0  # c: scaled scores become c * tanh(score / c)
    sinks: Tensor | None = None  # float32 [H]: one more logit per head in the softmax's denominator
    kv_scale: KvScale | None = None  # with 8-bit caches, and only with them
    value_scale: float = 1.0  # what a layer's values are multiplied with


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


class ChunkLoad(NamedTuple):
    """What the rows from the first one with more tokens than one on have to do, as the host knows it."""

    context: int  # positions of all their contexts together
    pairs: int  # of a token and a position that it sees
    all_context: int  # positions of all rows' contexts

    @classmethod
    def of(cls, counts: npt.NDArray[np.int64], context: npt.NDArray[np.int64]) -> "ChunkLoad":
        """By row: its tokens, and its context with them; the first rows may be such that decode."""
        longer = np.flatnonzero(counts > 1)
        first = int(longer[0]) if len(longer) else len(counts)
        total, counts, context = int(context.sum()), counts[first:], context[first:]
        return cls(int(context.sum()), int((counts * context - counts * (counts - 1) // 2).sum()), total)


@dataclass(frozen=True)
class AttentionRows:
    """Which tokens belong to which row, and where the rows' KV lies. Row j's tokens are the last of its context."""

    query_starts: Tensor  # int32 [R + 1]: row j has tokens query_starts[j] .. query_starts[j + 1] - 1
    context_lens: Tensor  # int32 [R]: KV length including this step's tokens, at least the row's tokens
    block_tables: Tensor  # int32 [R, M]: only the first ceil(context / B) entries of a row count
    block_tokens: int
    max_query: int
    max_context: int  # an upper bound where the step is replayed
    num_decode: int = 0  # the first rows that have exactly one token each; others may have one too
    table_rows: Tensor | None = None  # int32 [R]: row j's blocks are block_tables[table_rows[j]], not block_tables[j]
    chunk_load: ChunkLoad | None = None  # None: the step is replayed with other rows
    drafts: DraftEntries | None = None  # None: no row may have any

    @cached_property
    def derived(self) -> dict[str, Any]:
        """What implementations make of the rows once for all layers, by a name of their own."""
        return {}

    @cached_property
    def tables(self) -> Tensor:
        """int32 [R, M]: row j's blocks."""
        if self.table_rows is None:
            return self.block_tables
        return self.block_tables.index_select(0, self.table_rows)

    @cached_property
    def chunk_starts(self) -> Tensor:
        """int32 [R - num_decode + 1]: `query_starts` of the rows behind those that decode, counted from the first."""
        return self.query_starts[self.num_decode :] - self.num_decode if self.num_decode else self.query_starts

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The torch meaning's plan, made at first use (off a CPU this waits for the device)."""
        starts, context = self.query_starts.cpu().numpy(), self.context_lens.cpu().numpy()
        tables = self.tables.cpu().numpy()
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
        tables = self.tables.cpu().numpy()
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
        count, mask = tokens.stop - tokens.start, None
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
        num_decode=next((row for row, count in enumerate(counts) if count != 1), len(counts)),
        chunk_load=ChunkLoad.of(np.array(counts, np.int64), np.array(context, np.int64)),
    )


class Extras(NamedTuple):
    """What a case has beyond plain attention."""

    block_tokens: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    fp8: int = 0  # 1: with one scale, 2: with one for each token and head
    table_rows: bool = False
    value_dim: int = 0  # 0: as large as keys; else with a scale of values, too


def make_attention_case(
    name: str,
    counts: Sequence[int],
    context: Sequence[int],
    heads: tuple[int, int, int],
    runs: bool = False,
    extras: Extras = Extras(),  # noqa: B008
) -> Case:
    """`heads` is (query heads, KV heads, head size); blocks are scattered unless `runs`."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, AttentionRows, AttentionSpec]:
        generator = torch.Generator().manual_seed(sum(context))
        num_heads, num_kv_heads, head_dim = heads
        needed = [-(-length // extras.block_tokens) for length in context]
        pool = torch.arange(sum(needed)) if runs else torch.randperm(sum(needed) + 3, generator=generator)
        tables = [part.tolist() for part in torch.split(pool[: sum(needed)], needed)] if needed else []
        q = torch.randn(sum(counts), num_heads, head_dim, generator=generator).to(dtype)
        cache = torch.randn(2, len(pool), extras.block_tokens, num_kv_heads, head_dim, generator=generator)
        rows = make_attention_rows(counts, context, tables, extras.block_tokens)
        if extras.table_rows:
            places = torch.randperm(len(counts) + 2, generator=generator)[: len(counts)]
            scattered = torch.zeros(len(counts) + 2, rows.block_tables.shape[1], dtype=torch.int32)
            scattered[places] = rows.block_tables
            rows = replace(rows, block_tables=scattered, table_rows=places.to(torch.int32))
        sinks = torch.randn(num_heads, generator=generator) if extras.sinks else None
        kv_scale = KvScale(torch.tensor([0.02]), torch.tensor([0.03])) if extras.fp8 else None
        stored = [part.to(dtype) for part in cache]
        if extras.fp8 == 2:
            kv_scale = KvScale(
                *(own_scales(part.flatten(0, 1), torch.float8_e4m3fn).view(part.shape[:3]) for part in cache)
            )
            wide = (scale[..., None] for scale in kv_scale)
            stored = [store_kv(part, torch.float8_e4m3fn, scale) for part, scale in zip(cache, wide, strict=True)]
        elif kv_scale is not None:
            stored = [store_kv(part, torch.float8_e4m3fn, scale) for part, scale in zip(cache, kv_scale, strict=True)]
        if extras.value_dim:
            stored[1] = stored[1][..., : extras.value_dim].contiguous()
        given = head_dim**-0.5, extras.window, extras.softcap, sinks, kv_scale
        return q, stored[0], stored[1], rows, AttentionSpec(*given, 0.7 if extras.value_dim else 1.0)

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
        make_attention_case("decode_then_chunks", [1, 1, 9, 1, 20], [90, 1, 30, 64, 20], (4, 2, 96)),
        make_attention_case("head192", [1, 5], [70, 21], (2, 1, 192), extras=Extras(table_rows=True)),
        make_attention_case("head256", [1, 1, 3], [18, 100, 35], (4, 2, 256), extras=Extras(softcap=5.0)),
        make_attention_case("page64", [1, 1, 30], [64, 200, 90], (4, 2, 64), extras=Extras(64, table_rows=True)),
        make_attention_case("window", [1, 1, 40, 6], [150, 7, 90, 6], (4, 2, 64), extras=Extras(window=20)),
        make_attention_case("window1", [1, 4], [33, 40], (4, 4, 32), extras=Extras(window=1)),
        make_attention_case("sinks", [1, 1, 9, 4], [50, 1, 9, 100], (6, 2, 64), extras=Extras(sinks=True)),
        make_attention_case("window_sinks", [1, 30], [140, 60], (16, 2, 64), extras=Extras(window=32, sinks=True)),
        make_attention_case("softcap", [1, 1, 20], [70, 9, 40], (4, 2, 128), extras=Extras(window=33, softcap=2.0)),
        make_attention_case("fp8", [1, 1, 20], [120, 16, 50], (4, 2, 128), extras=Extras(fp8=1)),
        make_attention_case("fp8_window", [1, 8], [90, 40], (4, 1, 64), extras=Extras(64, 40, sinks=True, fp8=1)),
        make_attention_case("empty", [], [], (9, 3, 64)),
    ],
    tolerances={
        torch.float32: Tolerance(1e-5, 5e-6, "order of sums over the context"),
        torch.bfloat16: Tolerance(1.6e-2, 2e-2, "probabilities rounded to 8 bits before the second product, or not"),
        torch.float16: Tolerance(2e-3, 4e-3, "probabilities rounded to 11 bits before the second product, or not"),
    },
)
def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, spec: AttentionSpec) -> Tensor:
    """softmax(q k^T * scale) v over each row's own context, causal. Query head h reads KV head h * K // H.

    q: [T, H, D], last dimension dense; k_cache: [num_blocks, B, K, D]; v_cache: [num_blocks, B, K, E]; returns a new
    contiguous [T, H, E].
    Masked positions of read blocks must hold finite numbers.
    """
    groups = rows.groups
    if len(groups) == 1:
        return attend(q, k_cache, v_cache, groups[0], spec).contiguous()
    result = torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=q.dtype, device=q.device)
    for group in groups:
        result[group.tokens] = attend(q[group.tokens], k_cache, v_cache, group, spec)
    return result


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, group: Group, spec: AttentionSpec) -> Tensor:
    """q: the group's tokens [G, H, D]; returns [G, H, E]."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    share = q.shape[1] // num_kv_heads
    k, v = _context(k_cache, group), _context(v_cache, group)
    if spec.kv_scale is not None:
        k_scale, v_scale = spec.kv_scale
        if spec.kv_scale.each:
            k_scale, v_scale = _context(k_scale[..., None], group), _context(v_scale[..., None], group)
        k, v = (k.float() * k_scale).to(q.dtype), (v.float() * v_scale).to(q.dtype)
    if spec.value_scale != 1.0:
        v = v * spec.value_scale
    hidden = _windowed(q, group, spec.window) if spec.window else group.mask
    if spec.softcap or spec.sinks is not None:
        return _attend_by_steps(q, k, v, group, hidden, spec)
    mask = None if hidden is None else hidden.to(q.dtype)
    if group.is_chunk:
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=spec.scale,
            enable_gqa=share > 1,
        )
        return out.squeeze(0).transpose(0, 1)
    # the query heads of one KV head are its query positions, so that its keys are read once
    out = functional.scaled_dot_product_attention(
        q.view(group.num_rows, num_kv_heads, share, head_dim), k, v, attn_mask=mask, scale=spec.scale
    )
    return out.flatten(1, 2)


def _context(cache: Tensor, group: Group) -> Tensor:
    """cache: [num_blocks, B, K, D]; what the group's rows read of it, [rows, K, context, D]."""
    num_kv_heads, width = cache.shape[2:]
    if group.blocks is None:
        # the layout of a view of one row, made in one call
        size = (1, num_kv_heads, group.context, width)
        stride = (0, width, num_kv_heads * width, 1)
        return cache.as_strided(size, stride, cache.storage_offset() + group.run * cache.stride(0))
    padded = group.blocks.shape[0] // group.num_rows * cache.shape[1]
    rows = _gathered(cache, group.blocks).view(-1, padded, num_kv_heads, width)
    return rows[:, : group.context].transpose(1, 2)


def _gathered(cache: Tensor, blocks: Tensor) -> Tensor:
    """8-bit floats have no gather of their own everywhere."""
    if cache.element_size() == 1:
        return cache.view(torch.uint8).index_select(0, blocks).view(cache.dtype)
    return cache.index_select(0, blocks)


def _causal(q: Tensor, group: Group) -> Tensor:
    """The group's mask, also where it goes without one."""
    if group.mask is not None:
        return group.mask
    hidden = torch.zeros(len(q) if group.is_chunk else 1, group.context, device=q.device)
    return hidden.masked_fill_(torch.ones_like(hidden).triu_(1) > 0, -torch.inf) if group.is_chunk else hidden


def _windowed(q: Tensor, group: Group, window: int) -> Tensor:
    """The group's mask without keys that are `window` or more before the query."""
    hidden = _causal(q, group)
    seen = (hidden == 0).sum(-1, keepdim=True)
    return hidden.masked_fill(torch.arange(group.context, device=q.device) < seen - window, -torch.inf)


def _attend_by_steps(
    q: Tensor, k: Tensor, v: Tensor, group: Group, hidden: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """With changed scores or sinks, in float32. k, v: [rows, K, context, D]; `hidden` as Group.mask."""
    num_kv_heads, context = k.shape[1:3]
    share = q.shape[1] // num_kv_heads
    tokens = len(q) // group.num_rows
    # [rows, K, share, tokens, context], so that masks of both kinds fit
    grouped = q.view(group.num_rows, tokens, num_kv_heads, share, -1).permute(0, 2, 3, 1, 4).float()
    scores = grouped.flatten(2, 3) @ k.float().transpose(2, 3) * spec.scale
    scores = scores.view(group.num_rows, num_kv_heads, share, tokens, context)
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if hidden is None and group.is_chunk:
        hidden = _causal(q, group)
    if hidden is not None:
        scores = scores + (hidden if group.is_chunk else hidden.view(-1, 1, 1, 1, context))
    if spec.sinks is not None:
        sinks = spec.sinks.view(num_kv_heads, share, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., :context]
    out = (weights.flatten(2, 3) @ v.float()).view(group.num_rows, num_kv_heads, share, tokens, -1)
    return out.permute(0, 3, 1, 2, 4).reshape(*q.shape[:2], -1).to(q.dtype)
