"""Weights kept dense in the activation dtype: the exact mode (fp32), and possible for every checkpoint."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from services.worker.quant.contract import StoredTensor, Weight


class DenseWeight:
    """`values`: [out_features, in_features]."""

    format_name = "none"

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.out_features, self.in_features = values.shape
        self.num_bytes = values.numel() * values.element_size()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(x, self.values, bias)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.values)

    def dequantize(self) -> torch.Tensor:
        return self.values.to(torch.float32, copy=True)


class DenseFormat:
    name = "none"

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        return None

    def make(self, parts: Sequence[StoredTensor], activation: torch.dtype) -> Weight:
        return DenseWeight(fuse(parts, activation))


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
