"""Mixture of experts on the residual stream: x += sum of the gated MLPs that each token's router chose, weighted."""

from torch import Tensor

from services.worker.kernels.ops.moe_route import moe_route
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Bindings
from services.worker.layers.linear import Linear
from services.worker.models.spec import MoeSpec
from services.worker.quant.contract import ExpertWeights, Norm


class MoeMlp:
    def __init__(self, router: Linear, experts: ExpertWeights, spec: MoeSpec, bindings: Bindings) -> None:
        self.router, self.experts = router, experts
        self._top_k, self._renormalize = spec.top_k, spec.renormalize
        self._rms_norm, self._moe_route = bindings(rms_norm), bindings(moe_route)

    def __call__(self, x: Tensor, norm: Norm) -> None:
        """x: [T, N], the residual stream, changed in place."""
        normed = self._rms_norm(x, norm.weight, norm.eps)
        weights, experts = self._moe_route(self.router(normed), self._top_k, self._renormalize)
        self.experts.add_to(x, normed, weights, experts)
