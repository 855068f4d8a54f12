"""Gated DeltaNet of one layer, in attention's three parts: project (compilable), attend (ops), output (compilable)."""

from typing import NamedTuple

from torch import Tensor

from services.worker.kernels.ops.causal_conv import causal_conv
from services.worker.kernels.ops.gated_delta import GatedNorm, Past, gated_delta
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Bindings
from services.worker.layers.linear import Linear
from services.worker.models.spec import DeltaSpec
from services.worker.quant.contract import Norm


class DeltaParts(NamedTuple):
    """Parameters besides matrices."""

    conv: Tensor  # [H * G, taps], G convolved channels of a key head
    decay: Tensor  # float32 [H * V], more than 0
    decay_bias: Tensor  # float32 [H * V]
    norm: Norm  # of a value head


class DeltaNet:
    """H key heads with V value heads each, D numbers of a key, E of a value."""

    def __init__(self, spec: DeltaSpec, project: Linear, out: Linear, parts: DeltaParts, bindings: Bindings) -> None:
        self.project, self.out, self.parts = project, out, parts
        self._spec = spec
        self._conv, self._delta = bindings(causal_conv), bindings(gated_delta)

    def attend(
        self,
        projected: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: tuple[Tensor, ...],
        slots: Tensor,
        rows: AttentionRows,
    ) -> Tensor:
        """projected: [T, H * (2D + 2V * E) + H * 2V], from `project`; no rotation, since the state knows the order.

        cache: as DeltaSpec.cache has it, changed in place; slots: int64 [R], each row's block of all.
        Returns [T, H * V * E].
        """
        spec, (conv, decay, bias, norm) = self._spec, self.parts
        (inputs, matrices, *past), inner, split = cache, sum(spec.convolved), spec.heads * spec.width
        heads = projected[:, :split].view(-1, spec.heads, spec.width)
        gates = projected[:, split:].view(-1, spec.heads, 2 * spec.values)
        qkv = self._conv(heads[..., :inner], conv, inputs, slots, rows)
        kept = Past(*past) if past else None
        gated = GatedNorm(heads[..., inner:], norm.weight, norm.eps)
        return self._delta(qkv, gates, decay, bias, matrices, slots, rows, kept, gated).flatten(1)
