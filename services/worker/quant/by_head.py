"""A depthwise convolution whose channels lie part by part, as one whose channels lie by head."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.quant.contract import StoredTensor


@dataclass(frozen=True, slots=True)
class ByHead:
    """`whole`: [channels, 1, taps], each part's `heads` runs of parts[i] channels behind each other."""

    whole: StoredTensor
    heads: int
    parts: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.heads * sum(self.parts), self.whole.shape[-1]

    @property
    def storage(self) -> str:
        return "F32"

    @property
    def source(self) -> str:
        return self.whole.source

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        rows = torch.split(self.whole.dense(dtype).flatten(1), [self.heads * part for part in self.parts])
        return torch.cat([part.view(self.heads, -1, part.shape[1]) for part in rows], 1).flatten(0, 1)

    def blocks(self) -> torch.Tensor:
        raise ValueError(f'tensor "{self.name}" is put in another order, and so has no blocks')


def by_head(tensors: dict[str, StoredTensor], name: str, heads: int, parts: Sequence[int]) -> None:
    """Replaces the tensor of that name, where it is stored part by part; any other is left for the check of shapes."""
    tensor = tensors.get(name)
    if tensor is not None and len(tensor.shape) == 3 and tensor.shape[:2] == (heads * sum(parts), 1):
        tensors[name] = ByHead(tensor, heads, tuple(parts))
