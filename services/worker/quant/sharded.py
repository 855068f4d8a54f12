"""Weights of which each rank of a tensor-parallel group has a share, and which give the whole result at every rank.

A matrix whose rows are divided needs nothing of this: its result is a share of the next one's input. The layers do not
know: they call a `Weight`. Every rank calls in the same order. docs/adr/0026 says what is divided how.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional

from services.worker.kernels.ops.all_gather import all_gather
from services.worker.kernels.ops.all_reduce import all_reduce
from services.worker.kernels.ops.all_reduce_add_norm import all_reduce_add_norm
from services.worker.kernels.registry import Bindings
from services.worker.quant.contract import ExpertWeights, Norm, TakesGate, Weight


def has_joined(bindings: Bindings) -> bool:
    """Whether somebody has the sum, the add and the norm in one. Else products take the norm, which is faster."""
    return bindings.provider(all_reduce_add_norm) != "torch"


class SummedWeight:
    """`part`: this rank's columns. A bias is zero at all ranks but the first."""

    fused = None

    def __init__(self, part: Weight, bindings: Bindings) -> None:
        self.part = part
        self.out_features, self.in_features = part.out_features, part.in_features
        self.format_name, self.num_bytes = part.format_name, part.num_bytes
        self._all_reduce = bindings(all_reduce)
        self.joins_norm = has_joined(bindings)
        self._joined = bindings(all_reduce_add_norm) if self.joins_norm else None

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self.part.linear(x, bias)
        self._all_reduce(y)
        return y

    @property
    def takes_gate(self) -> bool:
        return isinstance(self.part, TakesGate) and self.part.takes_gate

    def after_gate(self, halves: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(self.part, TakesGate)
        y = self.part.after_gate(halves, bias)
        self._all_reduce(y)
        return y

    def add_and_norm(
        self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, gated: bool, norm: Norm
    ) -> torch.Tensor:
        assert self._joined is not None
        if gated:
            assert isinstance(self.part, TakesGate)
            share = self.part.after_gate(x, bias)
        else:
            share = self.part.linear(x, bias)
        return self._joined(share, residual, norm.weight, norm.eps)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Of this rank's columns."""
        return self.part.embed(ids)

    def dequantize(self) -> torch.Tensor:
        """Of this rank's columns."""
        return self.part.dequantize()


class VocabularyWeight:
    """Embedding, output head or both. `part`: the rows of this rank; `starts`: every rank's first row, and the end."""

    fused = None

    def __init__(self, part: Weight, starts: Sequence[int], rank: int, bindings: Bindings) -> None:
        self.part = part
        self.out_features, self.in_features = starts[-1], part.in_features
        self.format_name, self.num_bytes = part.format_name, part.num_bytes
        self._begin, self._size = starts[rank], part.out_features
        self._sizes = [end - begin for begin, end in pairwise(starts)]
        self._widest = max(self._sizes)
        self._all_reduce, self._all_gather = bindings(all_reduce), bindings(all_gather)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Whole logits at every rank: what is drawn from them depends on sums over the whole vocabulary in order."""
        y = self.part.linear(x, bias)
        if self._size < self._widest:
            y = functional.pad(y, (0, self._widest - self._size))
        gathered = y.new_empty(len(self._sizes) * len(y), self._widest)
        self._all_gather(y, gathered)
        shares = gathered.view(len(self._sizes), len(y), self._widest)
        return torch.cat([share[:, :size] for share, size in zip(shares, self._sizes, strict=True)], dim=1)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        own = ids - self._begin
        others = (own < 0) | (own >= self._size)
        x = self.part.embed(own.clamp(0, self._size - 1)).masked_fill_(others[:, None], 0.0)
        self._all_reduce(x)
        return x

    def dequantize(self) -> torch.Tensor:
        """Of this rank's rows."""
        return self.part.dequantize()


class SummedExperts:
    """`part`: this rank's share of every expert's inner width."""

    def __init__(self, part: ExpertWeights, bindings: Bindings) -> None:
        self.part = part
        self.num_experts, self.format_name, self.num_bytes = part.num_experts, part.format_name, part.num_bytes
        self._all_reduce = bindings(all_reduce)
        self.joins_norm = has_joined(bindings)
        self._joined = bindings(all_reduce_add_norm) if self.joins_norm else None

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> None:
        share = torch.zeros_like(residual)
        self.part.add_to(share, x, weights, experts)
        self._all_reduce(share)
        residual.add_(share)

    def add_and_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, norm: Norm
    ) -> torch.Tensor:
        assert self._joined is not None
        share = torch.zeros_like(residual)
        self.part.add_to(share, x, weights, experts)
        return self._joined(share, residual, norm.weight, norm.eps)
