"""What a call of an op gives and leaves in its arguments, and how arguments get to a device. Pure.

Arguments are tensors and what holds them: tuples, named tuples, lists and dataclasses. Callers: the self-test of
kernels at start, their tests, and benchmarks.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def convert(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with each tensor changed: tuples, named tuples, lists and dataclasses."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(convert(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(convert(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: convert(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


def tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside, with the path to it."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        for label, item in zip(names, value, strict=True):
            yield from tensors(item, f"{name}.{label}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name), f"{name}.{field.name}")


def outcome(result: Any, arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    """What a call gives and what it leaves in its arguments."""
    return dict(tensors(result, "result")) | dict(tensors(arguments, "argument"))


class Mover:
    """Copies to a device in the tensors' own strides; views of one storage stay views of one storage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), tensor.dtype)
        if key not in self._storages:
            size = storage.nbytes() // tensor.element_size()
            self._storages[key] = tensor.as_strided((size,), (1,), 0).to(self._device, copy=True)
        return self._storages[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def equal_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.numel():
        return True
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))
