"""Weights kept dense: the exact mode (fp32), the form for GPUs, and possible for every checkpoint."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from services.worker.kernels.ops.add_linear import add_linear
from services.worker.kernels.ops.embedding import embedding
from services.worker.kernels.ops.linear import linear
from services.worker.kernels.ops.norm_gated_linear import norm_gated_linear
from services.worker.kernels.ops.norm_linear import norm_linear
from services.worker.kernels.registry import Bindings
from services.worker.quant.contract import FusedProducts, Norm, StoredTensor, Weight

CPU = torch.device("cpu")


class DenseProducts:
    """The bound dense ops on one matrix [out_features, in_features] of the activations' dtype; a FusedProducts."""

    def __init__(self, values: torch.Tensor, bindings: Bindings) -> None:
        self._values = values
        self._linear, self._norm_linear = bindings(linear), bindings(norm_linear)
        self._norm_gated_linear, self._add_linear = bindings(norm_gated_linear), bindings(add_linear)
        self._embedding = bindings(embedding)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._linear(x, self._values, bias)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(ids, self._values)

    def after_norm(self, x: torch.Tensor, norm: Norm, bias: torch.Tensor | None) -> torch.Tensor:
        return self._norm_linear(x, norm.weight, norm.eps, self._values, bias)

    def gated(self, x: torch.Tensor, norm: Norm, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return self._norm_gated_linear(x, norm.weight, norm.eps, self._values, bias, activation)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._add_linear(residual, x, self._values, bias)


class DenseWeight:
    """`values`: [out_features, in_features]; `activation`: dtype that `embed` gives, by default the values'.

    `products`: the same matrix with ops that a provider fuses.
    """

    format_name = "none"

    def __init__(
        self, values: torch.Tensor, activation: torch.dtype | None = None, products: DenseProducts | None = None
    ) -> None:
        self.values = values
        self.fused: FusedProducts | None = products
        self._products = products
        self.activation = activation or values.dtype
        self.out_features, self.in_features = values.shape
        self.num_bytes = values.numel() * values.element_size()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._products is not None:
            return self._products.linear(x, bias)
        if self.values.dtype == x.dtype:
            return functional.linear(x, self.values, bias)
        y = functional.linear(x.to(self.values.dtype), self.values).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        if self._products is not None:
            return self._products.embed(ids)
        return functional.embedding(ids, self.values).to(self.activation)

    def dequantize(self) -> torch.Tensor:
        return self.values.to(torch.float32, copy=True)


class DenseFormat:
    """`dtype` of the weights may be narrower than the activations'. With `bindings` it may not."""

    name = "none"

    def __init__(
        self, dtype: torch.dtype, activation: torch.dtype, device: torch.device, bindings: Bindings | None = None
    ) -> None:
        assert bindings is None or dtype == activation
        self._bindings = bindings
        self.dtype = dtype
        self.activation = activation
        self.device = device

    def unavailable(self) -> str | None:
        return None

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        return None

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        values = fuse(parts, self.dtype, self.device)
        products = None if self._bindings is None else DenseProducts(values, self._bindings)
        return DenseWeight(values, self.activation, products)


def fuse(parts: Sequence[StoredTensor], dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    """The parts one below the other on `device`, [sum of out_i, in]; each is read straight to its place."""
    if len(parts) == 1:
        return parts[0].dense(dtype).to(device)
    fused = torch.empty(sum(part.shape[0] for part in parts), parts[0].shape[-1], dtype=dtype, device=device)
    begin = 0
    for part in parts:
        fused[begin : begin + part.shape[0]] = part.dense(dtype)
        begin += part.shape[0]
    return fused
