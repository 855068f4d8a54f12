"""What a weight is to the layers above, and what a weight format is to the loader.

A layer holds a `Weight` and calls `linear` or `embed`; it never asks for its format. The loader hands the checkpoint
tensors of one parameter (several when they are fused along the output dimension: q, k and v; gate and up) to the
`WeightFormat` that the policy in quant/registry.py chose, which makes the Weight from them.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch


class Norm(NamedTuple):
    """RMS normalization of a projection's input. `weight`: [in_features], activation dtype."""

    weight: torch.Tensor
    eps: float


class FusedProducts(Protocol):
    """Products together with what surrounds them in a layer, for weights that have kernels for it."""

    def after_norm(self, x: torch.Tensor, norm: Norm, bias: torch.Tensor | None) -> torch.Tensor:
        """linear(rms_norm(x)). x: [T, in_features]; returns a new [T, out_features]."""
        ...

    def gated(self, x: torch.Tensor, norm: Norm, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        """activation(gate) * up of after_norm's halves, gate first. Returns a new [T, out_features / 2]."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """residual += linear(x), in place. residual: [T, out_features], contiguous; x: [T, in_features]."""
        ...


class Weight(Protocol):
    """One linear or embedding matrix of `out_features` rows and `in_features` columns, in whatever form is fastest."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def format_name(self) -> str: ...

    @property
    def num_bytes(self) -> int:
        """Memory that this weight keeps, in bytes."""
        ...

    @property
    def fused(self) -> FusedProducts | None:
        """None: the layers compose these from `linear` and the ops around it."""
        ...

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x @ W.T + bias. x: [T, in_features], contiguous, in the model's activation dtype; returns [T, out_features].

        The result is a new tensor of x's dtype, whatever the weight computes in. bias: [out_features] in that dtype.
        T may be 0.
        """
        ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W. ids: int32 or int64 [T], each in [0, out_features); returns [T, in_features], activation dtype.

        Fast only in weights made for embeddings; elsewhere it is right, but may dequantize the whole matrix.
        """
        ...

    def dequantize(self) -> torch.Tensor:
        """The matrix that `linear` multiplies with, as a new fp32 tensor [out_features, in_features]."""
        ...


@runtime_checkable
class TakesGate(Protocol):
    """A weight whose input may be the two halves of a SwiGLU, if `takes_gate`: gated and quantized in one kernel."""

    @property
    def takes_gate(self) -> bool: ...

    def after_gate(self, halves: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """linear(silu_and_mul(halves)). halves: [T, 2 * in_features], gate first."""
        ...


@runtime_checkable
class JoinsNorm(Protocol):
    """A weight of which each rank has a share, if `joins_norm`: the sum over ranks and the next norm are one op."""

    @property
    def joins_norm(self) -> bool: ...

    def add_and_norm(
        self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, gated: bool, norm: Norm
    ) -> torch.Tensor:
        """residual += linear(x), in place, or if `gated` after_gate(x); returns the norm of residual, [T, N], new."""
        ...


class StoredTensor(Protocol):
    """One tensor of a checkpoint, still in its file; reading it gives a new tensor, so that nothing is kept twice."""

    @property
    def name(self) -> str:
        """The name in HF convention, e.g. "model.layers.0.self_attn.q_proj.weight"."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def storage(self) -> str:
        """How it is stored: "F32", "F16", "BF16", "Q4_1", ...; GGUF's names, also for safetensors."""
        ...

    @property
    def source(self) -> str:
        """File and name inside the file, for error messages."""
        ...

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of `shape` and `dtype`, dequantized where it is stored in blocks."""
        ...

    def blocks(self) -> torch.Tensor:
        """The stored bytes by row: uint8 [shape[0], bytes of a row]. Only for storage in blocks along the last axis."""
        ...


@runtime_checkable
class StackedTensor(StoredTensor, Protocol):
    """One that can be read in parts."""

    def entry(self, index: int) -> torch.Tensor:
        """`[index]` of the first dimension, as it is stored; nothing else is read."""
        ...


class WeightFormat(Protocol):
    """One way to keep matrices and multiply with them."""

    @property
    def name(self) -> str: ...

    def unavailable(self) -> str | None:
        """Why this format does not work on this machine, or None when it does."""
        ...

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        """Why this format cannot keep these checkpoint tensors as one matrix, or None when it can."""
        ...

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        """The parts (each [out_i, in]) as one matrix [sum of out_i, in], in order."""
        ...


class ExpertWeights(Protocol):
    """The gated MLPs of one layer's experts, in whatever form is fastest."""

    @property
    def num_experts(self) -> int: ...

    @property
    def format_name(self) -> str: ...

    @property
    def num_bytes(self) -> int:
        """Memory that these weights keep, in bytes."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> None:
        """residual[t] += sum over k of weights[t, k] * expert(experts[t, k])(x[t]), in place.

        residual, x: [T, N], contiguous, activation dtype; weights: float32 [T, K]; experts: int32 [T, K].
        """
        ...


@runtime_checkable
class ExpertsJoinNorm(Protocol):
    """Experts as JoinsNorm has weights."""

    @property
    def joins_norm(self) -> bool: ...

    def add_and_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, norm: Norm
    ) -> torch.Tensor:
        """`add_to`; returns the norm of residual, [T, N], new."""
        ...


class ExpertBiases(NamedTuple):
    """Of experts whose gate is bounded, too: see the op moe_clamped. In the activations' dtype."""

    gate_up: torch.Tensor  # [E, 2I], gate first
    down: torch.Tensor  # [E, N]


class ExpertFormat(Protocol):
    """One way to keep the experts of a layer and to multiply with those that each token chose."""

    @property
    def name(self) -> str: ...

    def refuses(
        self,
        gate_up: Sequence[Sequence[StoredTensor]],
        down: Sequence[StoredTensor],
        biases: ExpertBiases | None = None,
    ) -> str | None:
        """Why this format cannot keep these checkpoint tensors, or None when it can."""
        ...

    def make(
        self,
        gate_up: Sequence[Sequence[StoredTensor]],
        down: Sequence[StoredTensor],
        biases: ExpertBiases | None = None,
    ) -> ExpertWeights:
        """Per expert: gate and up, each [I, N], and down [N, I]. Each is read straight to its place."""
        ...
