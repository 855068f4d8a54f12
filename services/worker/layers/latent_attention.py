"""Multi-head latent attention of one layer (DeepSeek-V2, arXiv 2405.04434): project (compilable), attend, output.

The cache holds one latent and one rotated key per token. Each head's plain key and value are projections of the
latent: K = W_UK c, V = W_UV c. Absorbed, a query goes through W_UK and a result through W_UV instead, so that attention
reads the latents as they are; expanded, keys and values are made of the latents of a whole context. Letters: T tokens,
H heads, N plain, R rotated numbers of a query, V of a value, L of a latent.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.latent_write import LatentNorm, latent_write
from services.worker.kernels.ops.mla_decode import mla_decode
from services.worker.kernels.ops.mla_expanded import mla_expanded
from services.worker.kernels.ops.mla_prefill import mla_prefill
from services.worker.kernels.ops.paged_attention import AttentionRows, ChunkLoad
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Bindings
from services.worker.kernels.row_parts import RowParts
from services.worker.layers.indexer import EVERY, Indexer, IndexQueries, chosen
from services.worker.layers.kv_cache import LayerKv
from services.worker.layers.linear import Linear
from services.worker.models.spec import DecoderSpec
from services.worker.models.spec_latent import LatentSpec
from services.worker.quant.contract import Norm

# Tokens that attend to what they chose at once: kernels keep sums for each, and look among all for the one they are at.
CHOSEN_TOKENS = 1024
EXPANDED_BYTES = 512 << 20  # of keys and values at once: heads go one group after the other where they are more


def prefers_expanded(spec: LatentSpec, tokens: int, load: ChunkLoad) -> bool:
    """Whether keys and values made of the latents cost fewer operations than absorbed projections, per head.

    Products, counted after DeepSeek-V2 (arXiv 2405.04434, section 2.1.2 and appendix C): a pair of a token and a
    position costs 2 (N + R + V) expanded and 2 (2 L + R) absorbed; the projections 2 L (N + V) for each position of
    the contexts, or for each token. A whole prompt is cheaper expanded; behind a long context from
    L (N + V) / (2 L - N - V) tokens on, 171 for DeepSeek-V3.
    """
    projected = spec.latent * spec.expanded
    expanded = load.pairs * (spec.query_dim + spec.value_dim) + load.context * projected
    return expanded <= load.pairs * (spec.latent + spec.cached) + tokens * projected


def pieces(num_tokens: int) -> list[slice]:
    """Of a step's tokens that attend to what they chose."""
    if num_tokens <= CHOSEN_TOKENS:
        return [EVERY]
    return [slice(first, first + CHOSEN_TOKENS) for first in range(0, num_tokens, CHOSEN_TOKENS)]


def most_captured(spec: LatentSpec | None) -> int:
    """Tokens of chunks in the steps that are worth a captured graph, which does not know how long contexts are.

    Longer chunks are cheaper expanded behind any context, and an indexer scores whole contexts. `spec`: None of a model
    without latent attention, which has no such bound.
    """
    if spec is None or spec.indexer is not None:
        return 1 << 30 if spec is None else 0
    saved = spec.latent + spec.cached - spec.query_dim - spec.value_dim
    return spec.latent * spec.expanded // saved if saved > 0 else 1 << 30


class Projected(NamedTuple):
    """q: [T, H, N + R], heads of a token side by side; kv: [T, L + R], neither normed nor rotated."""

    q: Tensor
    kv: Tensor
    indexed: IndexQueries | None = None


class LatentProjection:
    """`down`: the query's latent, if it has one, else queries; then the latent and the key that is rotated, and the
    indexer's key. `q_up`: queries, and behind them the indexer's, of their latent."""

    def __init__(
        self,
        spec: DecoderSpec,
        down: Linear,
        q_norm: Norm | None,
        q_up: Linear | None,
        index_weights: Tensor | None,
        bindings: Bindings,
    ) -> None:
        """`index_weights`: float32 [index heads, N], where the layer has an indexer."""
        assert spec.latent is not None
        self.down, self.q_norm, self.q_up, self.index_weights = down, q_norm, q_up, index_weights
        self._spec, self._heads = spec.latent, spec.num_heads
        self._rms_norm = bindings(rms_norm)

    def after_norm(self, x: Tensor, norm: Norm) -> Projected:
        """x: [T, N], the residual stream."""
        if self.index_weights is None:
            return self._plain(self.down.after_norm(x, norm))
        return self(self._rms_norm(x, norm.weight, norm.eps))

    def __call__(self, normed: Tensor) -> Projected:
        """normed: [T, N], normed rows of it."""
        spec, size, width = self._spec, len(normed), self._heads * self._spec.query_dim
        if self.index_weights is None or spec.indexer is None:
            return self._plain(self.down(normed))
        indexer = spec.indexer
        sizes = [spec.query_rank, spec.cached, indexer.head_dim]
        first, kv, key = torch.split(self.down(normed), sizes, -1)
        queries = self._up(first)
        # as the checkpoints were trained, of fp32 weights; with the scale of the products
        weights = functional.linear(normed.float(), self.index_weights)
        weights = weights * (indexer.num_heads * indexer.head_dim) ** -0.5
        index_q = queries[:, width:].view(size, indexer.num_heads, indexer.head_dim)
        q = queries[:, :width].view(size, self._heads, spec.query_dim)
        return Projected(q, kv, IndexQueries(index_q, key, weights))

    def _plain(self, fused: Tensor) -> Projected:
        first, kv = fused[:, : -self._spec.cached], fused[:, -self._spec.cached :]
        return Projected(self._up(first).view(len(fused), self._heads, self._spec.query_dim), kv)

    def _up(self, first: Tensor) -> Tensor:
        if self.q_up is None or self.q_norm is None:
            return first
        return self.q_up.after_norm(first.contiguous(), self.q_norm)


class LatentAttention:
    def __init__(
        self,
        spec: DecoderSpec,
        project: LatentProjection,
        kv_norm: LatentNorm,
        kv_up: Tensor,
        out: Linear,
        indexer: Indexer | None,
        bindings: Bindings,
    ) -> None:
        """`indexer`: of a layer that chooses; one that shares a choice has none.

        `kv_up`: [H * (N + V), L], the checkpoint's kv_b_proj; W_UK and W_UV are views of it.
        """
        assert spec.latent is not None
        self.project, self.kv_norm, self.out, self.indexer = project, kv_norm, out, indexer
        self.kv_up = kv_up.view(spec.num_heads, spec.latent.expanded, spec.latent.latent)
        self._latent, self._heads = spec.latent, spec.num_heads
        self._scale = spec.attention_scale or spec.head_dim**-0.5
        self._write, self._expanded = bindings(latent_write), bindings(mla_expanded)
        self._decode, self._prefill = bindings(mla_decode), bindings(mla_prefill)

    def attend(
        self,
        projected: Projected,
        rotation: tuple[Tensor, Tensor],
        cache: LayerKv,
        slots: Tensor,
        rows: AttentionRows,
    ) -> Tensor:
        """rotation: cos and sin, each [T, 1, R]; cache: one head of LatentSpec.row numbers; slots: int64 [T].

        Writes the new latents to their slots, then reads every row's context. Returns [T, H * V].
        """
        spec, q, pages = self._latent, projected.q, cache.keys.squeeze(2)
        scale, norm = None if cache.scale is None else cache.scale.k, self.kv_norm
        if scale is not None:  # 8 bits hold numbers divided by it: the ops do not know, an index key has none
            norm = LatentNorm((norm.weight / scale).to(norm.weight.dtype), norm.eps)
            projected.kv[:, spec.latent :].div_(scale)
        self._write(q, projected.kv, *rotation, norm, pages, slots, spec.interleaved)
        if self.indexer is not None and projected.indexed is not None:
            self.indexer.write(projected.indexed, rotation, pages, slots)
        out = q.new_empty(len(q), self._heads, spec.value_dim)
        parts, load = RowParts.of(rows), rows.chunk_load
        first = parts.num_decode
        if spec.indexer is not None and rows.max_context > spec.indexer.top_k:
            if self.indexer is not None and projected.indexed is not None:
                self.indexer.choose(projected.indexed, pages, rows)
            for some in pieces(len(q)):
                self._absorb(q[some], partial(self._attend_chosen, pages, rows, some), out[some], scale)
        elif parts.num_chunks and load is not None and prefers_expanded(spec, len(q) - first, load):
            self._attend_expanded(q[first:], pages, parts, out[first:], scale)
            if first:
                self._absorb(q[:first], partial(self._attend_pages, pages, parts), out[:first], scale)
        else:
            self._absorb(q, partial(self._attend_pages, pages, parts), out, scale)
        return out.view(len(q), -1)

    def _absorb(self, q: Tensor, attend: Callable[[Tensor, Tensor], Tensor], out: Tensor, scale: Tensor | None) -> None:
        """q: [t, H, N + R]; attend: of latent and rotated queries, [t, H, L] and [t, H, R]; out: [t, H, V]."""
        nope = self._latent.nope_dim
        if scale is not None:
            q = (q * scale).to(q.dtype)
        latents = torch.bmm(q[..., :nope].transpose(0, 1), self.kv_up[:, :nope]).transpose(0, 1)
        results = attend(latents, q[..., nope:])
        torch.bmm(results.transpose(0, 1), self.kv_up[:, nope:].transpose(1, 2), out=out.transpose(0, 1))
        if scale is not None:
            out.mul_(scale)

    def _attend_pages(self, pages: Tensor, parts: RowParts, latents: Tensor, q_rope: Tensor) -> Tensor:
        """Of all tokens of the step, or of the rows that decode."""
        first, attended = parts.num_decode, []
        if first:
            attended.append(self._decode(latents[:first], q_rope[:first], pages, parts.decode, self._scale))
        if len(latents) > first:
            attended.append(self._prefill(latents[first:], q_rope[first:], pages, parts.chunks, self._scale))
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend_chosen(
        self, pages: Tensor, rows: AttentionRows, some: slice, latents: Tensor, q_rope: Tensor
    ) -> Tensor:
        """Pages of one token, and each token of `some` a row whose pages are those that it chose."""
        return self._decode(latents, q_rope, pages.view(-1, 1, pages.shape[2]), chosen(rows, some), self._scale)

    def _attend_expanded(self, q: Tensor, pages: Tensor, parts: RowParts, out: Tensor, scale: Tensor | None) -> None:
        """q: [t, H, N + R], of the chunks; out: [t, H, V]. Some heads at a time, so that a long context fits."""
        spec, chunks = self._latent, parts.chunks
        kept = pages.view(-1, pages.shape[2])
        if kept.element_size() > 1:
            rows = kept.index_select(0, parts.chunk_slots)
        else:  # 8-bit floats cannot be indexed
            rows = kept.view(torch.uint8).index_select(0, parts.chunk_slots).view(kept.dtype).to(q.dtype)
        if scale is not None:
            rows.mul_(scale)
        latents, keys = rows[:, : spec.latent], rows[:, spec.latent : spec.cached]
        per_head = len(rows) * spec.expanded * rows.element_size()
        together = max(EXPANDED_BYTES // per_head, 1)
        for head in range(0, self._heads, together):
            some = slice(head, head + together)
            kv = functional.linear(latents, self.kv_up[some].flatten(0, 1)).view(len(rows), -1, spec.expanded)
            starts = chunks.query_starts, parts.chunk_bounds
            out[:, some] = self._expanded(q[:, some], kv, keys, *starts, chunks.max_query, self._scale)
