"""Mixture of experts on the residual stream: x += sum of the gated MLPs that each token's router chose, weighted."""

from torch import Tensor

from services.worker.kernels.ops.norm_route import norm_route
from services.worker.kernels.registry import Bindings
from services.worker.models.spec import MoeSpec
from services.worker.quant.contract import ExpertWeights, Norm


class MoeMlp:
    """`router`: [E, N], activation dtype, whatever form the other weights have."""

    def __init__(self, router: Tensor, experts: ExpertWeights, spec: MoeSpec, bindings: Bindings) -> None:
        self.router, self.experts = router, experts
        self._top_k, self._renormalize = spec.top_k, spec.renormalize
        self._norm_route = bindings(norm_route)

    def __call__(self, x: Tensor, norm: Norm) -> None:
        """x: [T, N], the residual stream, changed in place."""
        normed, weights, experts = self._norm_route(
            x, norm.weight, norm.eps, self.router, self._top_k, self._renormalize
        )
        self.experts.add_to(x, normed, weights, experts)
