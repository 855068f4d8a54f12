"""Parts of checkpoint tensors, for ranks that have only a share of a weight. Called by the loader; reads on `dense`."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from services.worker.quant.contract import StoredTensor


@runtime_checkable
class CanNarrow(Protocol):
    """A StoredTensor that can leave out of its reading what is not wanted."""

    def narrow(self, dim: int, begin: int, end: int) -> StoredTensor:
        """Entries begin .. end - 1 of dimension `dim`; nothing else is read from the file."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Entries begin .. end - 1 along `dim` of a tensor that can only be read as a whole; never in blocks."""

    whole: StoredTensor
    dim: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def source(self) -> str:
        return self.whole.source

    @property
    def shape(self) -> tuple[int, ...]:
        return narrowed_shape(self.whole.shape, self.dim, self.begin, self.end)

    @property
    def storage(self) -> str:
        return "F32"

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.whole.dense(dtype).narrow(self.dim, self.begin, self.end - self.begin).clone()

    def blocks(self) -> torch.Tensor:
        raise ValueError(f'a part of tensor "{self.name}" is no whole number of blocks')


@dataclass(frozen=True, slots=True)
class Zeros:
    """In place of a tensor that another rank counts in."""

    name: str
    shape: tuple[int, ...]
    source: str
    storage: str = "F32"

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=dtype)

    def blocks(self) -> torch.Tensor:
        raise ValueError(f'tensor "{self.name}" is not stored here')


def narrow(tensor: StoredTensor, dim: int, begin: int, end: int) -> StoredTensor:
    """Entries begin .. end - 1 of dimension `dim`, as stored where that is possible."""
    if (begin, end) == (0, tensor.shape[dim]):
        return tensor
    return tensor.narrow(dim, begin, end) if isinstance(tensor, CanNarrow) else Part(tensor, dim, begin, end)


def narrowed_shape(shape: tuple[int, ...], dim: int, begin: int, end: int) -> tuple[int, ...]:
    assert 0 <= begin < end <= shape[dim], (shape, dim, begin, end)
    return (*shape[:dim], end - begin, *shape[dim + 1 :])
