"""A decoder built from a declaration: embedding, pre-norm layers, final norm, head.

The residual stream x [T, N] is one tensor that layers change in place. Between two attentions lies one piece of
per-token work (`between`), which knows neither rows nor the cache, so a device may compile it while attention stays
an op. Tensor legend: T tokens of the step, N hidden size, S sampled rows, V vocabulary, H query heads, K KV heads, D
head size.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from services.worker.groups import GroupStep, Layout, Storage, lay_out
from services.worker.kernels.ops.index_write import IndexNorm
from services.worker.kernels.ops.latent_write import LatentNorm
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.ops.rope_kv_write import HeadNorm
from services.worker.kernels.registry import Bindings
from services.worker.layers.attention import Attention
from services.worker.layers.delta_net import DeltaNet, DeltaParts
from services.worker.layers.gated_latent_attention import EmbeddingGate, GatedLatentAttention
from services.worker.layers.indexer import Indexer
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.latent_attention import LatentAttention, LatentProjection, Projected
from services.worker.layers.linear import Linear
from services.worker.layers.mlp import GatedMlp, NormedMlp
from services.worker.layers.moe import MoeMlp, Router
from services.worker.layers.mtp import MtpHead, MtpNorms
from services.worker.layers.rope import Rotation
from services.worker.models.spec import DecoderNames, DecoderSpec, DeltaSpec, ModelDef, MoeSpec, Parameters
from services.worker.models.spec_latent import LatentSpec, bias_of
from services.worker.quant.contract import ExpertBiases, Norm, Weight

Mlp = GatedMlp | NormedMlp | MoeMlp
Queries = Tensor | Projected  # with what goes into the cache: what `project` gives and `attend` takes


class DecoderLayer:
    """`rope`: which of the model's; `after_attention`: norm of attention's result before it is added."""

    def __init__(
        self,
        attention: Attention | DeltaNet | LatentAttention | GatedLatentAttention,
        mlp: Mlp,
        norms: tuple[Norm, Norm],
        bindings: Bindings,
        rope: int = 0,
        after_attention: Norm | None = None,
    ) -> None:
        """`norms`: of attention's input and of the MLP's."""
        self.attention, self.mlp, self.rope, self.after_attention = attention, mlp, rope, after_attention
        self.input_norm, self.post_norm = norms
        self._rms_norm = bindings(rms_norm)
        # who takes rows that a sum over ranks has normed, and whose own sum norms them for the next layer
        joinable = None if isinstance(mlp, NormedMlp) else mlp
        joined = joinable is not None and joinable.takes_normed and after_attention is None
        self._takes_normed = joinable if joined and attention.out.joins_norm else None
        self._joins = joinable if joinable is not None and joinable.joins_norm else None

    def project(self, x: Tensor) -> Queries:
        """x: [T, N]; returns queries, keys and values [T, (H + 2K) * D], or what latent attention has for them."""
        return self.attention.project.after_norm(x, self.input_norm)

    @property
    def joins_norm(self) -> bool:
        """Whether `finish_and_norm` may be called: one op sums its result over ranks and norms the stream."""
        return self._joins is not None

    def finish(self, x: Tensor, attended: Tensor) -> None:
        """x: [T, N], changed in place; attended: [T, H * D]."""
        if self._takes_normed is not None:
            self._takes_normed.add_to(x, self.attention.out.add_and_norm(x, attended, self.post_norm))
        else:
            self._add(x, attended)
            self.mlp(x, self.post_norm)

    def finish_and_norm(self, x: Tensor, attended: Tensor, following: Norm) -> Tensor:
        """`finish`; returns what `following` makes of x then, [T, N], new."""
        assert self._joins is not None
        if self._takes_normed is not None:
            normed = self.attention.out.add_and_norm(x, attended, self.post_norm)
            return self._joins.add_and_norm(x, normed, None, following)
        self._add(x, attended)
        return self._joins.add_and_norm(x, x, self.post_norm, following)

    def _add(self, x: Tensor, attended: Tensor) -> None:
        if self.after_attention is None:
            self.attention.out.add_to(x, attended)
        else:
            x.add_(self._rms_norm(self.attention.out(attended), *self.after_attention))


class ScaledEmbedding:
    """Rows of `weight` times `scale`, which has the activations' precision, as the checkpoints were trained."""

    def __init__(self, weight: Weight, scale: float, dtype: torch.dtype) -> None:
        self.weight, self.scale = weight, float(torch.tensor(scale, dtype=dtype))

    def embed(self, ids: Tensor) -> Tensor:
        return self.weight.embed(ids).mul_(self.scale)


Embedding = Weight | ScaledEmbedding


def start(embedding: Embedding, first: DecoderLayer, ids: Tensor) -> tuple[Tensor, Queries]:
    """ids: int [T]; returns the residual stream [T, N] and the first layer's projection."""
    x = embedding.embed(ids)
    return x, first.project(x)


def between(layer: DecoderLayer, following: DecoderLayer, x: Tensor, attended: Tensor) -> Queries:
    """From one layer's attention to the next one's: changes x in place, returns the next projection."""
    if layer.joins_norm:
        queries: Queries = following.attention.project(layer.finish_and_norm(x, attended, following.input_norm))
        return queries
    layer.finish(x, attended)
    return following.project(x)


def end(layer: DecoderLayer, x: Tensor, attended: Tensor) -> None:
    """What follows the last attention; changes x in place."""
    layer.finish(x, attended)


class Pieces(NamedTuple):
    """The per-token parts of a forward pass, as they are or compiled."""

    start: Callable[[Embedding, DecoderLayer, Tensor], tuple[Tensor, Queries]] = start
    between: Callable[[DecoderLayer, DecoderLayer, Tensor, Tensor], Queries] = between
    end: Callable[[DecoderLayer, Tensor, Tensor], None] = end


class Decoder:
    """`pieces` may be replaced by compiled ones before the first call."""

    gives_hidden = True  # hidden states: what it returns is the residual stream

    def __init__(
        self,
        spec: DecoderSpec,
        embedding: Embedding,
        layers: list[DecoderLayer],
        final_norm: Norm,
        head: Linear,
        mtp: Sequence[MtpHead] = (),
    ) -> None:
        self.spec, self.mtp = spec, mtp
        self.embedding, self.layers, self.final_norm, self.head = embedding, layers, final_norm, head
        self.pieces = Pieces()
        # gates make keys and values of whole contexts, whose lengths no captured step knows
        self.compiles = spec.latent is None or not spec.latent.gate

    def __call__(
        self,
        token_ids: Tensor,
        rotations: Sequence[Rotation],
        slots: Tensor,
        rows: AttentionRows,
        cache: KvCache,
        outputs: Tensor | None,
        beside: Sequence[GroupStep] = (),
    ) -> Tensor:
        """Runs the layers. token_ids: int [T]; rotations: as RopeTable.at gives them; slots: int64 [T].

        `slots` and `rows` are those of the first group; `beside` has those of the cache's other groups.
        Returns the residual stream of the tokens `outputs` (int64 [S]; None: of all), for `logits`.
        """
        rows.derived["ids"] = token_ids  # for gates
        qkv: Any  # whatever the layers' attention projects and takes
        x, qkv = self.pieces.start(self.embedding, self.layers[0], token_ids)
        steps = (GroupStep(slots, rows), *beside)
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache.layers[: len(self.layers)], strict=True)):
            attention: Any = layer.attention
            attended = attention.attend(qkv, rotations[layer.rope], layer_cache, *steps[cache.groups[i]])
            if layer is not self.layers[-1]:
                qkv = self.pieces.between(layer, self.layers[i + 1], x, attended)
        if outputs is not None:
            # what follows the last attention is per token: nobody reads the rest
            attended, x = attended.index_select(0, outputs), x.index_select(0, outputs)
        self.pieces.end(self.layers[-1], x, attended)
        return x

    def layout(self, block_tokens: int, storage: Storage, every: int = 0) -> Layout:
        """How the cache is laid out; `every` as in lay_out."""
        kept = [self.spec.cache_of(layer) for layer in range(self.spec.num_layers)]
        return lay_out(kept, block_tokens, storage, every)

    def logits(self, x: Tensor) -> Tensor:
        """x: [S, N], from a call; returns [S, V] in the activations' dtype."""
        return self.head.after_norm(x, self.final_norm)

    def hidden(self, x: Tensor) -> Tensor:
        """x: [S, N], from a call; returns it behind the final norm, [S, N]: what vectors are made of."""
        return self.head.normed(x, self.final_norm)


def build_decoder(spec: DecoderSpec, model: ModelDef, parameters: Parameters, bindings: Bindings) -> Decoder:
    """Asks for every parameter once, in layer order. Raises KeyError naming a tensor that the checkpoint lacks."""
    names = model.names
    table = parameters.weight(names.embedding)
    layers = [LayerBuilder(spec, names, i, parameters, bindings)() for i in range(spec.trunk_layers)]
    head = table if spec.tie_embeddings else parameters.weight(names.head)
    final_norm = Norm(parameters.tensor(names.final_norm) + spec.norm_offset, spec.rms_eps)
    scaled = ScaledEmbedding(table, spec.embed_scale, final_norm.weight.dtype) if spec.embed_scale != 1.0 else table
    linear = Linear(head, None, bindings)
    builders = [LayerBuilder(spec, names, i, parameters, bindings) for i in range(spec.trunk_layers, spec.num_layers)]
    mtp = [build_mtp(builder, scaled, final_norm, linear) for builder in builders]
    return Decoder(spec, scaled, layers, final_norm, linear, mtp)


def build_mtp(build: "LayerBuilder", embedding: Embedding, trunk_norm: Norm, head: Linear) -> MtpHead:
    names = build.names.mtp
    assert names is not None, "a model with multi-token prediction names its tensors"
    norms = MtpNorms(
        trunk_norm, build.norm(names.embed_norm), build.norm(names.hidden_norm), build.norm(names.final_norm)
    )
    project = build.linear(False, names.project)
    return MtpHead(build(), embedding, norms, project, head, names.hidden_first, build.bindings)


class LayerBuilder:
    """Makes one layer; every method asks for what it names."""

    def __init__(
        self, spec: DecoderSpec, names: DecoderNames, index: int, parameters: Parameters, bindings: Bindings
    ) -> None:
        self.spec, self.names, self.index = spec, names, index
        self.parameters, self.bindings = parameters, bindings

    def __call__(self) -> DecoderLayer:
        spec, names = self.spec, self.names
        input_norm = self.norm(names.input_norm)
        delta = spec.delta_of(self.index)
        attention: Attention | DeltaNet | LatentAttention | GatedLatentAttention
        if delta is not None:
            attention = self.delta_net(delta)
        else:
            attention = self.attention() if spec.latent is None else self.latent_attention(spec.latent)
        after_attention = self.norm(names.after_attention) if spec.post_norms else None
        post_norm = self.norm(names.post_norm)
        moe = spec.experts_of(self.index)
        mlp: Mlp
        if moe is not None:
            mlp = self.mixture(moe)
        else:
            mlp = self.mlp(names.gate_up, names.down)
            if spec.post_norms:
                mlp = NormedMlp(mlp, self.norm(names.after_mlp), self.bindings)
        rope = int(spec.local_rope is not None and spec.window_of(self.index) > 0)
        return DecoderLayer(attention, mlp, (input_norm, post_norm), self.bindings, rope, after_attention)

    def tensor(self, name: str, wide: bool = False) -> Tensor:
        return self.parameters.tensor(name.format(i=self.index), wide=wide)

    def norm(self, name: str) -> Norm:
        return Norm(self.tensor(name) + self.spec.norm_offset, self.spec.rms_eps)

    def linear(self, has_bias: bool, *parts: str) -> Linear:
        full = [part.format(i=self.index) for part in parts]
        bias = self.parameters.tensor(*map(bias_of, full)) if has_bias else None
        return Linear(self.parameters.weight(*full), bias, self.bindings)

    def attention(self) -> Attention:
        spec, names = self.spec, self.names
        qkv = self.linear(spec.qkv_bias, *names.qkv)
        head_norm = None
        if spec.qk_norm:
            q, k = self.norm(names.q_norm), self.norm(names.k_norm)
            head_norm = HeadNorm(q.weight, k.weight, spec.rms_eps)
        sinks = self.tensor(names.sinks, wide=True) if spec.has_sinks(self.index) else None
        out = self.linear(spec.out_bias, names.out)
        return Attention(spec, qkv, out, head_norm, self.bindings, spec.window_of(self.index), sinks)

    def delta_net(self, delta: DeltaSpec) -> DeltaNet:
        names = self.names.delta
        assert names is not None, "a model with gated DeltaNet names its tensors"
        project, out = self.linear(False, names.qkvz, names.ba), self.linear(False, names.out)
        decay, bias = self.tensor(names.decay, wide=True).exp(), self.tensor(names.decay_bias, wide=True)
        norm = Norm(self.tensor(names.norm), self.spec.rms_eps)
        parts = DeltaParts(self.tensor(names.conv), decay, bias, norm)
        return DeltaNet(delta, project, out, parts, self.bindings)

    def latent_attention(self, latent: LatentSpec) -> LatentAttention | GatedLatentAttention:
        spec, names = self.spec, self.names.latent
        assert names is not None, "a model with latent attention names its tensors"
        indexer, weights = None, None
        if latent.indexer is not None and not latent.indexer.shares(self.index):
            key_norm = IndexNorm(self.tensor(names.index_k_norm), self.tensor(bias_of(names.index_k_norm)))
            indexer = Indexer(latent.indexer, key_norm, self.bindings)
            weights = self.tensor(names.index_weights, wide=True)
        q_up, q_norm, down = None, None, [self.names.qkv[0], names.kv_a]
        if latent.query_rank:
            q_up = self.linear(False, names.q_b, *([names.index_q] if indexer else []))
            q_norm = Norm(self.tensor(names.q_a_norm), latent.norm_eps)
            down = [names.q_a, names.kv_a, *([names.index_k] if indexer else [])]
        has_bias = latent.bias and latent.query_rank > 0
        project = LatentProjection(spec, self.linear(has_bias, *down), q_norm, q_up, weights, self.bindings)
        kv_norm, kv_up = LatentNorm(self.tensor(names.kv_a_norm), latent.norm_eps), self.tensor(names.kv_b)
        out = self.linear(spec.out_bias, self.names.out)
        if latent.gate:
            parts = (names.gate, names.gate_up, names.gated_norm, bias_of(names.gated_norm))
            gate = EmbeddingGate(*(self.tensor(name) for name in parts))
            return GatedLatentAttention(spec, project, kv_norm, kv_up, out, gate, self.bindings)
        return LatentAttention(spec, project, kv_norm, kv_up, out, indexer, self.bindings)

    def mlp(self, gate_up: tuple[str, str], down: str) -> GatedMlp:
        has_bias = self.spec.mlp_bias
        return GatedMlp(self.linear(has_bias, *gate_up), self.linear(has_bias, down), self.spec.activation)

    def mixture(self, moe: MoeSpec) -> MoeMlp:
        parts = self.names.experts
        assert parts is not None, "a model with a mixture names its tensors"
        wide = moe.grouped is not None
        router = Router(
            self.tensor(parts.router, wide),
            self.tensor(bias_of(parts.router), wide) if moe.clamped else None,
            self.tensor(parts.correction, wide=True) if moe.grouped is not None and not moe.grouped.softmax else None,
        )
        numbers = range(moe.num_experts)
        gate, up = ([name.format(i=self.index, e=e) for e in numbers] for name in parts.gate_up)
        down = [parts.down.format(i=self.index, e=e) for e in numbers]
        biases = None
        if moe.clamped:
            rows = [self.parameters.tensor(*map(bias_of, names)) for names in (gate, up, down)]
            stacks = [bias.view(moe.num_experts, -1) for bias in rows]
            biases = ExpertBiases(torch.cat(stacks[:2], 1), stacks[2])
        experts = self.parameters.experts(list(zip(gate, up, strict=True)), down, biases)
        shared = self.mlp(parts.shared_gate_up, parts.shared_down) if moe.shared_inner else None
        shared_gate = self.tensor(parts.shared_gate) if moe.shared_gate else None
        return MoeMlp(router, experts, moe, self.bindings, shared, shared_gate)
