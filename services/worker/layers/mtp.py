"""A head for multi-token prediction (DeepSeek-V3 report, 2.2): one decoder layer that looks one token further.

From the hidden state of position p and the token at p + 1, it predicts the token at p + 2. Embedding and output head
are the model's own. Its keys and values lie in a layer of the model's cache, at position p.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Bindings
from services.worker.layers.kv_cache import LayerKv
from services.worker.layers.linear import Linear
from services.worker.layers.rope import Rotation
from services.worker.models.spec import DecoderSpec
from services.worker.quant.contract import Norm


def with_mtp(spec: DecoderSpec, heads: int = 1) -> DecoderSpec:
    """The model with so many layers for multi-token prediction as layers more. Raises ValueError where it has none."""
    if not spec.mtp_layers:
        raise ValueError(
            'speculative.method is "mtp", but the model has no layer for it, or none that is known here; '
            "others: ngram, draft"
        )
    own, moe = spec.num_layers, spec.moe
    windows = (*(spec.window_of(layer) for layer in range(own)), *[spec.mtp_window] * heads)
    if moe is not None and spec.mtp_dense:
        moe = replace(moe, dense_layers=(*moe.dense_layers, *range(own, own + heads)))
    return replace(spec, num_layers=own + heads, with_mtp=heads, windows=windows if any(windows) else (), moe=moe)


class Embeds(Protocol):
    def embed(self, ids: Tensor) -> Tensor: ...


class Layer(Protocol):
    """layers/decoder.py's."""

    attention: Any
    rope: int

    def project(self, x: Tensor) -> Any: ...

    def finish(self, x: Tensor, attended: Tensor) -> None: ...


class MtpNorms(NamedTuple):
    trunk: Norm  # of the model, before its head
    embed: Norm
    hidden: Norm
    final: Norm


class MtpHead:
    def __init__(
        self,
        layer: Layer,
        embedding: Embeds,
        norms: MtpNorms,
        project: Linear,
        head: Linear,
        hidden_first: bool,
        bindings: Bindings,
    ) -> None:
        self._layer, self._embedding, self._norms = layer, embedding, norms
        self._project, self._head, self._hidden_first = project, head, hidden_first
        self._rms_norm = bindings(rms_norm)

    def trunk(self, x: Tensor) -> Tensor:
        """x: [T, N], the model's residual stream. Returns the hidden states [T, N] that the first call takes."""
        return self._rms_norm(x, *self._norms.trunk)

    def __call__(
        self,
        ids: Tensor,
        hidden: Tensor,
        rotations: tuple[Rotation, ...],
        cache: LayerKv,
        slots: Tensor,
        rows: AttentionRows,
    ) -> Tensor:
        """ids: int [T], the tokens one further than `hidden` [T, N]; rotations and slots (int64 [T]) are those of
        `hidden`. Returns hidden states [T, N] for `logits`, and for a call one token further."""
        embedded = self._rms_norm(self._embedding.embed(ids), *self._norms.embed)
        hidden = self._rms_norm(hidden, *self._norms.hidden)
        x = self._project(torch.cat((hidden, embedded) if self._hidden_first else (embedded, hidden), -1))
        attended = self._layer.attention.attend(self._layer.project(x), rotations[self._layer.rope], cache, slots, rows)
        self._layer.finish(x, attended)
        return self._rms_norm(x, *self._norms.final)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, V] of [S, N]."""
        return self._head(hidden)
