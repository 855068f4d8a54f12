"""Grouped-query attention of one layer, in three parts: project (compilable), attend (ops), output (compilable)."""

import torch
from torch import Tensor

from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec, paged_attention
from services.worker.kernels.ops.rope_kv_write import HeadNorm, rope_kv_write
from services.worker.kernels.ops.sigmoid_gate import sigmoid_gate
from services.worker.kernels.registry import Bindings
from services.worker.layers.kv_cache import LayerKv
from services.worker.layers.linear import Linear
from services.worker.models.spec import DecoderSpec


class Attention:
    def __init__(
        self,
        spec: DecoderSpec,
        qkv: Linear,
        out: Linear,
        head_norm: HeadNorm | None,
        bindings: Bindings,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        """`window`, `sinks`: as in AttentionSpec."""
        self.project, self.out, self.head_norm = qkv, out, head_norm
        # with the scale of the cache that was used last
        scale = spec.attention_scale or spec.head_dim**-0.5
        self._spec = AttentionSpec(scale, window, sinks=sinks, value_scale=spec.value_scale)
        self._sigmoid_gate = bindings(sigmoid_gate) if spec.attention_gate else None
        self._head_dim, self._num_heads = spec.head_dim, spec.num_heads
        self._rope_kv_write, self._paged_attention = bindings(rope_kv_write), bindings(paged_attention)

    def attend(
        self,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: LayerKv,
        slots: Tensor,
        rows: AttentionRows,
    ) -> Tensor:
        """qkv: [T, (H + 2K) * D], from `project`; rotation: cos and sin, each [T, 1, R]; slots: int64 [T].

        With DecoderSpec.attention_gate qkv is [T, (2H + 2K) * D], behind each query its gate. Writes the new keys and
        values to their slots, then reads every row's context. Returns [T, H * D].
        """
        keys, values, scale = cache
        if scale is not self._spec.kv_scale:
            self._spec = self._spec._replace(kv_scale=scale)
        if self._sigmoid_gate is not None:
            heads = qkv.view(len(qkv), -1, self._head_dim)
            own = heads[:, : 2 * self._num_heads].view(len(qkv), self._num_heads, 2 * self._head_dim)
            gate = own[..., self._head_dim :]
            qkv = torch.cat((own[..., : self._head_dim], heads[:, 2 * self._num_heads :]), 1).flatten(1)
        q = self._rope_kv_write(qkv, *rotation, keys, values, slots, self.head_norm, scale)
        attended = self._paged_attention(q, keys, values, rows, self._spec)
        if self._sigmoid_gate is not None:
            attended = self._sigmoid_gate(attended, gate)
        return attended.view(len(q), -1)
