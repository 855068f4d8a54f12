"""Grouped-query attention of one layer, in three parts: project (compilable), attend (an op), output (compilable)."""

from dataclasses import dataclass

from torch import Tensor

from services.worker.kernels.ops.kv_write import kv_write
from services.worker.kernels.ops.paged_attention import AttentionRows, paged_attention
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.ops.rope import rope
from services.worker.kernels.registry import Bindings
from services.worker.layers.linear import Linear
from services.worker.models.spec import DecoderSpec


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm over each head of q and k, before the rotation. Weights: [D]."""

    q: Tensor
    k: Tensor
    eps: float


class Attention:
    def __init__(
        self, spec: DecoderSpec, qkv: Linear, out: Linear, head_norm: HeadNorm | None, bindings: Bindings
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qkv, self.out, self.head_norm = qkv, out, head_norm
        self._rope, self._rms_norm = bindings(rope), bindings(rms_norm)
        self._kv_write, self._paged_attention = bindings(kv_write), bindings(paged_attention)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [T, N]; returns q [T, H, D] and k, v [T, K, D], rotated, views of fewer tensors."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        q_end, k_end = self.num_heads, self.num_heads + self.num_kv_heads
        v = heads[:, k_end:]
        if self.head_norm is None:
            turned = self._rope(heads[:, :k_end], cos, sin)
            return turned[:, :q_end], turned[:, q_end:], v
        q = self._rms_norm(heads[:, :q_end], self.head_norm.q, self.head_norm.eps)
        k = self._rms_norm(heads[:, q_end:k_end], self.head_norm.k, self.head_norm.eps)
        return self._rope(q, cos, sin), self._rope(k, cos, sin), v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], slots: Tensor, rows: AttentionRows
    ) -> Tensor:
        """Writes k and v to their slots, then reads every row's context. Returns [T, H * D]."""
        self._kv_write(k, v, cache[0], cache[1], slots)
        return self._paged_attention(q, cache[0], cache[1], rows, self.head_dim**-0.5).view(len(q), -1)
