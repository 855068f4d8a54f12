"""Weights kept dense: the exact mode (fp32), the form for GPUs, and possible for every checkpoint."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from services.worker.quant.contract import StoredTensor, Weight


class DenseWeight:
    """`values`: [out_features, in_features]; `activation`: dtype that `embed` gives, by default the values'."""

    format_name = "none"

    def __init__(self, values: torch.Tensor, activation: torch.dtype | None = None) -> None:
        self.values = values
        self.activation = activation or values.dtype
        self.out_features, self.in_features = values.shape
        self.num_bytes = values.numel() * values.element_size()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.values.dtype == x.dtype:
            return functional.linear(x, self.values, bias)
        y = functional.linear(x.to(self.values.dtype), self.values).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.values).to(self.activation)

    def dequantize(self) -> torch.Tensor:
        return self.values.to(torch.float32, copy=True)


class DenseFormat:
    """`dtype` of the weights may be narrower than the activations'."""

    name = "none"

    def __init__(self, dtype: torch.dtype, activation: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.activation = activation
        self.device = device

    def unavailable(self) -> str | None:
        return None

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        return None

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        return DenseWeight(fuse(parts, self.dtype).to(self.device), self.activation)


def fuse(parts: Sequence[StoredTensor], dtype: torch.dtype) -> torch.Tensor:
    """The parts one below the other, [sum of out_i, in]; each is read straight to its place."""
    if len(parts) == 1:
        return parts[0].dense(dtype)
    fused = torch.empty(sum(part.shape[0] for part in parts), parts[0].shape[-1], dtype=dtype)
    begin = 0
    for part in parts:
        fused[begin : begin + part.shape[0]] = part.dense(dtype)
        begin += part.shape[0]
    return fused
