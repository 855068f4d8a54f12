"""Embedding-gated multi-head latent attention (EG-MLA, arXiv 2509.16686) of one layer.

A position's keys and values are LayerNorm((W_UKV c) * (W_UE e)), where c is its latent and e an embedding of its token.
The gate stands between the latent and the heads, so W_UKV cannot be absorbed: keys and values are made of the latents
of whole contexts in every step. The cache has, besides latent and rotated key, the token's id and the mean and inverse
deviation of all heads' gated numbers, so that ranks agree on the norm by one sum when a token is written.
"""

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.all_reduce import all_reduce
from services.worker.kernels.ops.latent_write import LatentNorm, latent_write
from services.worker.kernels.ops.mla_expanded import mla_expanded
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Bindings
from services.worker.kernels.row_parts import bounds_of, slots_of
from services.worker.layers.kv_cache import LayerKv
from services.worker.layers.latent_attention import EXPANDED_BYTES, LatentProjection, Projected
from services.worker.layers.linear import Linear
from services.worker.models.spec import DecoderSpec
from services.worker.models.spec_latent import GATE_NUMBERS

EPS = 1e-5  # of the layer norm


class EmbeddingGate:
    """`embedding`: [V, E]; `up`: [H * (N + V), E]; `weight`, `bias`: [H * (N + V)], of the layer norm."""

    def __init__(self, embedding: Tensor, up: Tensor, weight: Tensor, bias: Tensor) -> None:
        self.embedding, self.up, self.weight, self.bias = embedding, up, weight, bias

    def gated(self, latents: Tensor, kv_up: Tensor, ids: Tensor, part: slice) -> Tensor:
        """float32 [S, rows of the part]: not yet normed. kv_up: [H * (N + V), L]."""
        gates = functional.linear(self.embedding.index_select(0, ids), self.up[part])
        return functional.linear(latents, kv_up[part]).float() * gates.float()

    def known(self, latents: Tensor, kv_up: Tensor, ids: Tensor) -> Tensor:
        """int32 [T, 4]: of new tokens what the cache has to know: id, mean and inverse deviation, and nothing."""
        numbers = self.gated(latents, kv_up, ids, slice(None))
        count = torch.full_like(numbers[:, 0], numbers.shape[1])
        sums = torch.stack((numbers.sum(1), numbers.square().sum(1), count), 1)
        # of all ranks' heads; not what is bound for the activations' dtype
        all_reduce.meaning(sums)
        mean = sums[:, 0] / sums[:, 2]
        inverse = ((sums[:, 1] / sums[:, 2] - mean.square()).clamp_(min=0) + EPS).rsqrt()
        words = mean.contiguous().view(torch.int32), inverse.contiguous().view(torch.int32)
        return torch.stack((ids.to(torch.int32), *words, torch.zeros_like(words[0])), 1)

    def normed(self, latents: Tensor, kv_up: Tensor, known: Tensor, part: slice) -> Tensor:
        """[S, rows of the part], in the latents' dtype. known: int32 [S, 4 or more], as the cache has it."""
        mean, inverse = (known[:, place : place + 1].contiguous().view(torch.float32) for place in (1, 2))
        numbers = (self.gated(latents, kv_up, known[:, 0], part) - mean) * inverse
        return (numbers * self.weight[part].float() + self.bias[part].float()).to(latents.dtype)


class GatedLatentAttention:
    def __init__(
        self,
        spec: DecoderSpec,
        project: LatentProjection,
        kv_norm: LatentNorm,
        kv_up: Tensor,
        out: Linear,
        gate: EmbeddingGate,
        bindings: Bindings,
    ) -> None:
        """`kv_up`: [H * (N + V), L]."""
        assert spec.latent is not None
        self.project, self.kv_norm, self.kv_up, self.out, self.gate = project, kv_norm, kv_up, out, gate
        self._latent, self._heads = spec.latent, spec.num_heads
        self._scale = spec.attention_scale or spec.head_dim**-0.5
        self._write, self._expanded = bindings(latent_write), bindings(mla_expanded)

    def attend(
        self,
        projected: Projected,
        rotation: tuple[Tensor, Tensor],
        cache: LayerKv,
        slots: Tensor,
        rows: AttentionRows,
    ) -> Tensor:
        """As LatentAttention's; the tokens' ids are in rows.derived["ids"]. Returns [T, H * V]."""
        spec, q = self._latent, projected.q
        pages = cache.keys.squeeze(2)
        self._write(q, projected.kv, *rotation, self.kv_norm, pages, slots, spec.interleaved)
        lines = pages.view(-1, pages.shape[2])
        latents = lines.index_select(0, slots)[:, : spec.latent]
        known = self.gate.known(latents, self.kv_up, rows.derived["ids"])
        numbers = known.view(pages.dtype)
        lines[slots, spec.cached : spec.cached + numbers.shape[1]] = numbers
        bounds, places = contexts_of(rows)
        read = lines.index_select(0, places)
        latents, keys = read[:, : spec.latent], read[:, spec.latent : spec.cached]
        known = read[:, spec.cached : spec.cached + GATE_NUMBERS].contiguous().view(torch.int32)
        together = max(EXPANDED_BYTES // max(len(read) * spec.expanded * 4, 1), 1)
        out = q.new_empty(len(q), self._heads, spec.value_dim)
        for head in range(0, self._heads, together):
            part = slice(head * spec.expanded, (head + together) * spec.expanded)
            kv = self.gate.normed(latents, self.kv_up, known, part).view(len(read), -1, spec.expanded)
            some, starts = slice(head, head + together), (rows.query_starts, bounds)
            out[:, some] = self._expanded(q[:, some], kv, keys, *starts, rows.max_query, self._scale)
        return out.view(len(q), -1)


def contexts_of(rows: AttentionRows) -> tuple[Tensor, Tensor]:
    """Where each row's positions begin, and the slots of all, one row behind the other; made once for all layers."""
    if "contexts" not in rows.derived:
        assert rows.chunk_load is not None, "the host does not know the contexts of a step that is replayed"
        bounds = bounds_of(rows)
        rows.derived["contexts"] = bounds, slots_of(rows, bounds, rows.chunk_load.all_context)
    found: tuple[Tensor, Tensor] = rows.derived["contexts"]
    return found
