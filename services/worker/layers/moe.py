"""Mixture of experts on the residual stream: x += sum of the gated MLPs that each token's router chose, weighted."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.moe_route_biased import moe_route_biased
from services.worker.kernels.ops.moe_route_grouped import moe_route_grouped
from services.worker.kernels.ops.norm_route import norm_route
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.ops.shared_expert_gate import shared_expert_gate
from services.worker.kernels.registry import Bindings
from services.worker.layers.mlp import GatedMlp
from services.worker.models.spec import MoeSpec
from services.worker.quant.contract import ExpertsJoinNorm, ExpertWeights, Norm


class Router(NamedTuple):
    """`weight`: [E, N], `bias`: [E], both of the activations' dtype, but float32 with GroupedRouting.

    `correction`: float32 [E], of GroupedRouting by sigmoid scores, and only of it.
    """

    weight: Tensor
    bias: Tensor | None = None
    correction: Tensor | None = None


class MoeMlp:
    """`shared`: an MLP for every token; `shared_gate`: [1, N], of the sigmoid that its result is multiplied with.

    `joins_norm`: whether the next norm may come with the result, by `add_and_norm`.
    """

    def __init__(
        self,
        router: Router,
        experts: ExpertWeights,
        spec: MoeSpec,
        bindings: Bindings,
        shared: GatedMlp | None = None,
        shared_gate: Tensor | None = None,
    ) -> None:
        self.router, self.experts, self.shared, self.shared_gate = router, experts, shared, shared_gate
        self._shared_gate = bindings(shared_expert_gate) if shared_gate is not None else None
        self._spec = spec
        self.joins_norm = isinstance(experts, ExpertsJoinNorm) and experts.joins_norm
        # only what is called is asked for: what a start compiles depends on it
        grouped = spec.grouped
        self._norm_route = bindings(norm_route) if grouped is None else None
        self._rms_norm = bindings(rms_norm)
        self._route_biased = bindings(moe_route_biased) if grouped is not None and not grouped.softmax else None
        self._route_grouped = bindings(moe_route_grouped) if grouped is not None and grouped.softmax else None

    @property
    def takes_normed(self) -> bool:
        """Whether it gains by rows that are normed already: norm_route would norm them beside the rest."""
        return self._norm_route is None

    def __call__(self, x: Tensor, norm: Norm) -> None:
        """x: [T, N], the residual stream, changed in place."""
        self.add_to(x, x, norm)

    def add_to(self, residual: Tensor, x: Tensor, norm: Norm | None = None) -> None:
        """residual += the mixture of norm(x); without a norm, only if `takes_normed`, x is normed already."""
        normed, weights, experts = self._route(x, norm)
        self._add_shared(residual, normed)
        self.experts.add_to(residual, normed, weights, experts)

    def add_and_norm(self, residual: Tensor, x: Tensor, norm: Norm | None, following: Norm) -> Tensor:
        """`add_to`, if `joins_norm`; returns what `following` makes of residual then, [T, N], new."""
        assert isinstance(self.experts, ExpertsJoinNorm)
        normed, weights, experts = self._route(x, norm)
        self._add_shared(residual, normed)
        return self.experts.add_and_norm(residual, normed, weights, experts, following)

    def _add_shared(self, residual: Tensor, normed: Tensor) -> None:
        if self.shared is not None and self._shared_gate is not None and self.shared_gate is not None:
            # on the way down, so that the result is added as any other
            halves = self.shared.gate_up(normed)
            self.shared.down.add_to(residual, self._shared_gate(halves, normed, self.shared_gate))
        elif self.shared is not None:
            self.shared.add_to(residual, normed)

    def _route(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor, Tensor]:
        """The normed rows [T, N], and the weights and numbers of their experts [T, K]."""
        spec, grouped, correction = self._spec, self._spec.grouped, self.router.correction
        if self._norm_route is not None:
            assert norm is not None
            weight, bias, _ = self.router
            return self._norm_route(x, norm.weight, norm.eps, weight, bias, spec.top_k, spec.renormalize)
        assert grouped is not None
        normed = x if norm is None else self._rms_norm(x, norm.weight, norm.eps)
        # not the op: kernels are bound for the activations' dtype
        logits = functional.linear(normed.float(), self.router.weight, self.router.bias)
        groups, manner = (grouped.num_groups, grouped.top_groups, spec.top_k), spec.renormalize
        if self._route_grouped is not None:
            return normed, *self._route_grouped(logits, *groups, manner, True, grouped.scale)
        assert self._route_biased is not None and correction is not None
        return normed, *self._route_biased(logits, correction, *groups, manner, grouped.scale)
