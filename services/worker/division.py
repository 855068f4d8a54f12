"""How a decoder's checkpoint is divided among the ranks of a group: which part of each tensor, and what joins them.

Called by the loader for each parameter. A tensor that no rule names is an error: kept whole it might be counted by
each rank.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from common.errors import ConfigError
from services.worker.kernels.registry import Bindings
from services.worker.models.delta_spec import DeltaNames, DeltaSpec
from services.worker.models.spec import DecoderNames, DecoderSpec
from services.worker.models.spec_latent import LatentSpec, bias_of
from services.worker.quant.contract import ExpertWeights, StoredTensor, Weight
from services.worker.quant.narrow import Zeros, narrow
from services.worker.quant.sharded import SummedExperts, SummedWeight, VocabularyWeight
from services.worker.shares import Rank, Span, heads_of

WHOLE = None


class Cut(NamedTuple):
    """What a rank has of a tensor. Of one that is added to a sum, like a bias, only one rank has anything (`once`)."""

    dim: int
    span: Span
    once: bool = False


Cuts = Mapping[str, Cut | None]


class Division:
    """`spec`: of the whole model."""

    def __init__(self, spec: DecoderSpec, names: DecoderNames, rank: Rank, bindings: Bindings) -> None:
        self.rank = rank
        self._bindings = bindings
        self._cuts = dict(cuts_of(spec, names, rank))
        self._vocabulary = (names.embedding, names.head)
        self._starts = [Rank(r, rank.ranks).of(spec.vocab_size).begin for r in range(rank.ranks)] + [spec.vocab_size]

    def part(self, name: str, tensor: StoredTensor) -> StoredTensor:
        """What this rank reads of the parameter `name`. Raises ConfigError where no rule names it."""
        if name not in self._cuts:
            raise ConfigError(
                f'{tensor.source}: "{name}" cannot be divided among ranks; set worker.tensor_parallel to 1'
            )
        cut = self._cuts[name]
        if cut is WHOLE:
            return tensor
        if cut.once:
            return tensor if self.rank.rank == 0 else Zeros(tensor.name, tensor.shape, tensor.source)
        return narrow(tensor, cut.dim, *cut.span)

    def join(self, name: str, weight: Weight) -> Weight:
        """The weight made of the parts of `name` and of what is fused with it, as the layers are to call it."""
        if name in self._vocabulary:
            return VocabularyWeight(weight, self._starts, self.rank.rank, self._bindings)
        cut = self._cuts[name]
        return SummedWeight(weight, self._bindings) if cut is not WHOLE and cut.dim == 1 else weight

    def join_experts(self, experts: ExpertWeights) -> ExpertWeights:
        return SummedExperts(experts, self._bindings)


def cuts_of(spec: DecoderSpec, names: DecoderNames, rank: Rank) -> Iterator[tuple[str, Cut | None]]:
    """Every tensor of a decoder by name. Raises ValueError where ranks and heads do not go together."""
    rows = rank.of(spec.vocab_size)
    yield names.embedding, Cut(0, rows)
    yield names.head, Cut(0, rows)
    yield names.final_norm, WHOLE
    for i in range(spec.num_layers):
        norms = names.input_norm, names.post_norm, names.q_norm, names.k_norm, names.after_attention, names.after_mlp
        for name in norms:
            yield name.format(i=i), WHOLE
        heads = heads_of(rank, spec.num_heads, spec.kv_heads_of(i))
        query = heads.query.times(spec.head_dim * (2 if spec.attention_gate else 1))
        qkv = query, heads.kv.times(spec.head_dim), heads.kv.times(spec.values_dim)
        yield names.sinks.format(i=i), Cut(0, heads.query)
        if (delta := spec.delta_of(i)) is not None and names.delta is not None:
            yield from _delta_cuts(delta, names.delta, i, rank)
        if spec.latent is not None:
            yield from _latent_cuts(spec.latent, names, i, heads.query)
        else:
            for name, span in zip(names.qkv, qkv, strict=True):
                yield from _rows(name.format(i=i), span)
            yield from _columns(names.out.format(i=i), heads.query.times(spec.values_dim))
        yield from _mlp_cuts(spec, names, i, rank)
    if spec.with_mtp and (mtp := names.mtp) is not None:
        for name in (mtp.embed_norm, mtp.hidden_norm, mtp.final_norm, mtp.project):
            yield from ((name.format(i=i), WHOLE) for i in range(spec.trunk_layers, spec.num_layers))


def _delta_cuts(spec: DeltaSpec, names: DeltaNames, layer: int, rank: Rank) -> Iterator[tuple[str, Cut | None]]:
    """Key heads are divided, with their value heads."""
    heads = rank.of(spec.heads)
    values = heads.times(spec.values)
    yield names.norm.format(i=layer), WHOLE
    yield names.qkvz.format(i=layer), Cut(0, heads.times(spec.width))
    yield names.ba.format(i=layer), Cut(0, values.times(2))
    yield names.conv.format(i=layer), Cut(0, heads.times(sum(spec.convolved)))
    for name in (names.decay, names.decay_bias):
        yield name.format(i=layer), Cut(0, values)
    yield names.out.format(i=layer), Cut(1, values.times(spec.value_dim))


def _latent_cuts(spec: LatentSpec, names: DecoderNames, layer: int, heads: Span) -> Iterator[tuple[str, Cut | None]]:
    """Heads are divided; latents, and what chooses among the tokens, are the same at every rank."""
    parts = names.latent
    assert parts is not None, "a model with latent attention names its tensors"
    for name in (parts.q_a, parts.kv_a, parts.index_k_norm):
        yield name.format(i=layer), WHOLE
        yield bias_of(name.format(i=layer)), WHOLE
    for name in (parts.q_a_norm, parts.kv_a_norm, parts.index_q, parts.index_k, parts.index_weights, parts.gate):
        yield name.format(i=layer), WHOLE
    for name in (names.qkv[0], parts.q_b):
        yield name.format(i=layer), Cut(0, heads.times(spec.query_dim))
    for name in (parts.kv_b, parts.gate_up, parts.gated_norm):
        yield from _rows(name.format(i=layer), heads.times(spec.expanded))
    yield from _columns(names.out.format(i=layer), heads.times(spec.value_dim))


def _mlp_cuts(spec: DecoderSpec, names: DecoderNames, layer: int, rank: Rank) -> Iterator[tuple[str, Cut | None]]:
    moe, experts = spec.experts_of(layer), names.experts
    if moe is None or experts is None:
        inner = rank.of_width(spec.intermediate_size)
        for name in names.gate_up:
            yield from _rows(name.format(i=layer), inner)
        yield from _columns(names.down.format(i=layer), inner)
        return
    inner, shared = rank.of_width(moe.inner), rank.of_width(moe.shared_inner)
    router = experts.router.format(i=layer)
    for name in (router, bias_of(router), experts.correction.format(i=layer), experts.shared_gate.format(i=layer)):
        yield name, WHOLE
    for name in experts.shared_gate_up:
        yield from _rows(name.format(i=layer), shared)
    yield from _columns(experts.shared_down.format(i=layer), shared)
    for e in range(moe.num_experts):
        for name in experts.gate_up:
            yield from _rows(name.format(i=layer, e=e), inner)
        yield from _columns(experts.down.format(i=layer, e=e), inner)


def _rows(name: str, span: Span) -> Iterator[tuple[str, Cut | None]]:
    """A matrix whose results are divided, and its bias."""
    yield name, Cut(0, span)
    yield bias_of(name), Cut(0, span)


def _columns(name: str, span: Span) -> Iterator[tuple[str, Cut | None]]:
    """A matrix whose input is divided, so that its results are summed; its bias is counted once."""
    yield name, Cut(1, span)
    yield bias_of(name), Cut(0, span, once=True)
