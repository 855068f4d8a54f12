"""What is derived from a tensor and used again and again: made once, kept as long as that tensor.

State: a `Kept` holds what it made. Right only for tensors whose numbers do not change while they live, captured graphs
included: those of a step are made anew by each run, those of a cache's scales never change.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


class Kept(Generic[T]):
    """make(first, second), once for the same `first`. What it makes may not hold `first`, which would keep both."""

    def __init__(self, make: Callable[[Tensor, Tensor], T]) -> None:
        self._make = make
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __call__(self, first: Tensor, second: Tensor) -> T:
        found: T | None = self._made.get(first)  # type: ignore[no-untyped-call]
        if found is None:
            found = self._made[first] = self._make(first, second)
        return found
