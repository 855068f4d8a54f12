"""A dense decoder built from a declaration: embedding, pre-norm layers, final norm, head.

A layer offers the part before attention (`pre`) and the part after it (`post`); neither knows rows or the cache, so a
device may compile them while attention stays an op. Tensor legend: T tokens of the step, N hidden size, S sampled
rows, V vocabulary, H query heads, K KV heads, D head size.
"""

from typing import NamedTuple

from torch import Tensor

from services.worker.kernels.ops.add_rms_norm import add_rms_norm
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.ops.rope_kv_write import HeadNorm
from services.worker.kernels.registry import Bindings
from services.worker.layers.attention import Attention
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.linear import Linear
from services.worker.layers.mlp import GatedMlp
from services.worker.models.spec import DecoderNames, DecoderSpec, ModelDef, Parameters
from services.worker.quant.contract import Weight


class Norms(NamedTuple):
    """Weights [N] of one layer's two norms."""

    input: Tensor
    post: Tensor


class DecoderLayer:
    def __init__(self, attention: Attention, mlp: GatedMlp, norms: Norms, eps: float, bindings: Bindings) -> None:
        self.attention, self.mlp, self.norms, self._eps = attention, mlp, norms, eps
        self._rms_norm, self._add_rms_norm = bindings(rms_norm), bindings(add_rms_norm)

    def pre(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x: [T, N], the previous layer's output; residual: the sum before it, None for the first layer.

        Returns the projection [T, (H + 2K) * D] and the new residual.
        """
        if residual is None:
            normed, residual = self._rms_norm(x, self.norms.input, self._eps), x
        else:
            normed, residual = self._add_rms_norm(x, residual, self.norms.input, self._eps)
        return self.attention.project(normed), residual

    def post(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """attended: [T, H * D]; returns the layer's output [T, N], not yet added, and the residual."""
        normed, residual = self._add_rms_norm(self.attention.out(attended), residual, self.norms.post, self._eps)
        return self.mlp(normed), residual


class Decoder:
    def __init__(
        self,
        spec: DecoderSpec,
        embedding: Weight,
        layers: list[DecoderLayer],
        final_norm: Tensor,
        head: Weight,
        bindings: Bindings,
    ) -> None:
        self.spec = spec
        self.embedding, self.layers, self.final_norm, self.head = embedding, layers, final_norm, head
        self._add_rms_norm = bindings(add_rms_norm)

    def __call__(
        self,
        token_ids: Tensor,
        rotation: tuple[Tensor, Tensor],
        slots: Tensor,
        rows: AttentionRows,
        cache: KvCache,
        outputs: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the layers. token_ids: int [T]; rotation: cos and sin [T, 1, R]; slots: int64 [T].

        Returns the last layer's output and residual of the tokens `outputs` (int64 [S]; None: of all), for `logits`.
        """
        x, residual = self.embedding.embed(token_ids), None
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            qkv, residual = layer.pre(x, residual)
            attended = layer.attention.attend(qkv, rotation, layer_cache, slots, rows)
            if outputs is not None and layer is self.layers[-1]:
                # what follows attention is per token: nobody reads the rest
                attended, residual = attended.index_select(0, outputs), residual.index_select(0, outputs)
            x, residual = layer.post(attended, residual)
        assert residual is not None
        return x, residual

    def logits(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual: [S, N]; returns float32 [S, V]."""
        normed, _ = self._add_rms_norm(x, residual, self.final_norm, self.spec.rms_eps)
        return self.head.linear(normed).float()


def build_decoder(spec: DecoderSpec, model: ModelDef, parameters: Parameters, bindings: Bindings) -> Decoder:
    """Asks for every parameter once, in layer order. Raises KeyError naming a tensor that the checkpoint lacks."""
    names = model.names
    embedding = parameters.weight(names.embedding)
    layers = [_build_layer(spec, names, i, parameters, bindings) for i in range(spec.num_layers)]
    head = embedding if spec.tie_embeddings else parameters.weight(names.head)
    return Decoder(spec, embedding, layers, parameters.tensor(names.final_norm), head, bindings)


def _build_layer(
    spec: DecoderSpec, names: DecoderNames, index: int, parameters: Parameters, bindings: Bindings
) -> DecoderLayer:
    def linear(has_bias: bool, *parts: str) -> Linear:
        full = [part.format(i=index) for part in parts]
        biases = [name.removesuffix(".weight") + ".bias" for name in full]
        return Linear(parameters.weight(*full), parameters.tensor(*biases) if has_bias else None)

    def tensor(name: str) -> Tensor:
        return parameters.tensor(name.format(i=index))

    norm = tensor(names.input_norm)
    qkv = linear(spec.qkv_bias, *names.qkv)
    head_norm = HeadNorm(tensor(names.q_norm), tensor(names.k_norm), spec.rms_eps) if spec.qk_norm else None
    attention = Attention(spec, qkv, linear(spec.out_bias, names.out), head_norm, bindings)
    norms = Norms(norm, tensor(names.post_norm))
    mlp = GatedMlp(linear(spec.mlp_bias, *names.gate_up), linear(spec.mlp_bias, names.down), bindings)
    return DecoderLayer(attention, mlp, norms, spec.rms_eps, bindings)
