"""Weights made of other weights: one form for few rows and another for many; a table for embedding and a head."""

from collections.abc import Sequence

import torch

from services.worker.quant.contract import StoredTensor, Weight, WeightFormat


class BySizeWeight:
    """`few` multiplies x of fewer than `many_rows` rows, `many` the others; both hold the same matrix."""

    fused = None

    def __init__(self, few: Weight, many: Weight, many_rows: int) -> None:
        self.few = few
        self.many = many
        self.many_rows = many_rows
        self.out_features, self.in_features = few.out_features, few.in_features
        self.format_name = f"{few.format_name}+{many.format_name}"
        self.num_bytes = few.num_bytes + many.num_bytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return (self.few if x.shape[0] < self.many_rows else self.many).linear(x, bias)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.many.embed(ids)

    def dequantize(self) -> torch.Tensor:
        return self.many.dequantize()


class BySizeFormat:
    def __init__(self, few: WeightFormat, many: WeightFormat, many_rows: int) -> None:
        self.few = few
        self.many = many
        self.many_rows = many_rows
        self.name = f"{few.name}+{many.name}"

    def unavailable(self) -> str | None:
        return self.few.unavailable() or self.many.unavailable()

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        return self.few.refuses(parts) or self.many.refuses(parts)

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        return BySizeWeight(self.few.make(parts), self.many.make(parts), self.many_rows)


class TiedWeight:
    """One matrix that is both the embedding (`table`) and the output head (`head`), each in its own form."""

    fused = None

    def __init__(self, table: Weight, head: Weight) -> None:
        self.table = table
        self.head = head
        self.out_features, self.in_features = table.out_features, table.in_features
        self.format_name = head.format_name
        self.num_bytes = table.num_bytes + head.num_bytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.head.linear(x, bias)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table.embed(ids)

    def dequantize(self) -> torch.Tensor:
        return self.head.dequantize()
