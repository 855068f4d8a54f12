"""A decoder built from a declaration: embedding, pre-norm layers, final norm, head.

The residual stream x [T, N] is one tensor that layers change in place. Between two attentions lies one piece of
per-token work (`between`), which knows neither rows nor the cache, so a device may compile it while attention stays
an op. Tensor legend: T tokens of the step, N hidden size, S sampled rows, V vocabulary, H query heads, K KV heads, D
head size.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.ops.rope_kv_write import HeadNorm
from services.worker.kernels.registry import Bindings
from services.worker.layers.attention import Attention
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.linear import Linear
from services.worker.layers.mlp import GatedMlp
from services.worker.layers.moe import MoeMlp
from services.worker.models.spec import DecoderNames, DecoderSpec, ModelDef, Parameters
from services.worker.quant.contract import Norm, Weight


class DecoderLayer:
    def __init__(self, attention: Attention, mlp: GatedMlp | MoeMlp, input_norm: Norm, post_norm: Norm) -> None:
        self.attention, self.mlp, self.input_norm, self.post_norm = attention, mlp, input_norm, post_norm

    def project(self, x: Tensor) -> Tensor:
        """x: [T, N]; returns queries, keys and values [T, (H + 2K) * D]."""
        return self.attention.project.after_norm(x, self.input_norm)

    def finish(self, x: Tensor, attended: Tensor) -> None:
        """x: [T, N], changed in place; attended: [T, H * D]."""
        self.attention.out.add_to(x, attended)
        self.mlp(x, self.post_norm)


def start(embedding: Weight, first: DecoderLayer, ids: Tensor) -> tuple[Tensor, Tensor]:
    """ids: int [T]; returns the residual stream [T, N] and the first layer's projection."""
    x = embedding.embed(ids)
    return x, first.project(x)


def between(layer: DecoderLayer, following: DecoderLayer, x: Tensor, attended: Tensor) -> Tensor:
    """From one layer's attention to the next one's: changes x in place, returns the next projection."""
    layer.finish(x, attended)
    return following.project(x)


def end(layer: DecoderLayer, x: Tensor, attended: Tensor) -> None:
    """What follows the last attention; changes x in place."""
    layer.finish(x, attended)


class Pieces(NamedTuple):
    """The per-token parts of a forward pass, as they are or compiled."""

    start: Callable[[Weight, DecoderLayer, Tensor], tuple[Tensor, Tensor]] = start
    between: Callable[[DecoderLayer, DecoderLayer, Tensor, Tensor], Tensor] = between
    end: Callable[[DecoderLayer, Tensor, Tensor], None] = end


class Decoder:
    """`pieces` may be replaced by compiled ones before the first call."""

    def __init__(
        self, spec: DecoderSpec, embedding: Weight, layers: list[DecoderLayer], final_norm: Norm, head: Linear
    ) -> None:
        self.spec = spec
        self.embedding, self.layers, self.final_norm, self.head = embedding, layers, final_norm, head
        self.pieces = Pieces()

    def __call__(
        self,
        token_ids: Tensor,
        rotation: tuple[Tensor, Tensor],
        slots: Tensor,
        rows: AttentionRows,
        cache: KvCache,
        outputs: Tensor | None,
    ) -> Tensor:
        """Runs the layers. token_ids: int [T]; rotation: cos and sin [T, 1, R]; slots: int64 [T].

        Returns the residual stream of the tokens `outputs` (int64 [S]; None: of all), for `logits`.
        """
        x, qkv = self.pieces.start(self.embedding, self.layers[0], token_ids)
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache.layers, strict=True)):
            attended = layer.attention.attend(qkv, rotation, layer_cache, slots, rows)
            if layer is not self.layers[-1]:
                qkv = self.pieces.between(layer, self.layers[i + 1], x, attended)
        if outputs is not None:
            # what follows the last attention is per token: nobody reads the rest
            attended, x = attended.index_select(0, outputs), x.index_select(0, outputs)
        self.pieces.end(self.layers[-1], x, attended)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """x: [S, N], from a call; returns [S, V] in the activations' dtype."""
        return self.head.after_norm(x, self.final_norm)


def build_decoder(spec: DecoderSpec, model: ModelDef, parameters: Parameters, bindings: Bindings) -> Decoder:
    """Asks for every parameter once, in layer order. Raises KeyError naming a tensor that the checkpoint lacks."""
    names = model.names
    embedding = parameters.weight(names.embedding)
    layers = [_build_layer(spec, names, i, parameters, bindings) for i in range(spec.num_layers)]
    head = embedding if spec.tie_embeddings else parameters.weight(names.head)
    final_norm = Norm(parameters.tensor(names.final_norm), spec.rms_eps)
    return Decoder(spec, embedding, layers, final_norm, Linear(head, None, bindings))


def _build_layer(
    spec: DecoderSpec, names: DecoderNames, index: int, parameters: Parameters, bindings: Bindings
) -> DecoderLayer:
    def linear(has_bias: bool, *parts: str) -> Linear:
        full = [part.format(i=index) for part in parts]
        biases = [name.removesuffix(".weight") + ".bias" for name in full]
        return Linear(parameters.weight(*full), parameters.tensor(*biases) if has_bias else None, bindings)

    def tensor(name: str) -> Tensor:
        return parameters.tensor(name.format(i=index))

    input_norm = Norm(tensor(names.input_norm), spec.rms_eps)
    qkv = linear(spec.qkv_bias, *names.qkv)
    head_norm = HeadNorm(tensor(names.q_norm), tensor(names.k_norm), spec.rms_eps) if spec.qk_norm else None
    attention = Attention(spec, qkv, linear(spec.out_bias, names.out), head_norm, bindings)
    post_norm = Norm(tensor(names.post_norm), spec.rms_eps)
    mlp: GatedMlp | MoeMlp
    if (moe := spec.experts_of(index)) is not None and (parts := names.experts) is not None:
        router = tensor(parts.router)
        numbers = range(moe.num_experts)
        gate_up = [(parts.gate_up[0].format(i=index, e=e), parts.gate_up[1].format(i=index, e=e)) for e in numbers]
        experts = parameters.experts(gate_up, [parts.down.format(i=index, e=e) for e in numbers])
        mlp = MoeMlp(router, experts, moe, bindings)
    else:
        mlp = GatedMlp(linear(spec.mlp_bias, *names.gate_up), linear(spec.mlp_bias, names.down))
    return DecoderLayer(attention, mlp, input_norm, post_norm)
