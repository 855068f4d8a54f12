"""An implementation's answers against its op's meaning, on any device. No figure of a benchmark without it.

The meaning runs on the CPU. Callers: benchmarks/kernels.py, and the tests of kernels, which add traps.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Facts, Impl, Op, Tolerance

UNTOUCHED = Tolerance(0.0, 0.0, "the meaning leaves it as it is")


def facts(device: torch.device, dtype: torch.dtype) -> Facts:
    """What a choice of an implementation may depend on; shapes are left open."""
    if device.type == "cpu":
        return Facts("cpu", dtype=dtype)
    properties = torch.cuda.get_device_properties(device)
    arch = properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return Facts("cuda", arch, dtype)


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


def compare(left: Tensor, right: Tensor, tolerance: Tolerance, place: str) -> None:
    """Raises AssertionError, with `place`, if they differ by more than the tolerance. Whole numbers must be equal."""
    assert left.dtype == right.dtype, f"{place} is {left.dtype}, not {right.dtype}"
    assert left.shape == right.shape, f"{place} is {tuple(left.shape)}, not {tuple(right.shape)}"
    is_exact = tolerance.relative == tolerance.absolute == 0.0 or not right.is_floating_point()
    if is_exact and not equal_bits(left, right):
        wrong = (left.double() != right.double()).nonzero()
        if len(wrong):
            first = tuple(wrong[0].tolist())
            text = f"{len(wrong)} of {right.numel()} differ; at {first} {left[first].item()}, not {right[first].item()}"
            raise AssertionError(f"{place}: {text}")
    if not is_exact:
        if right.element_size() == 1:
            # a small difference before the rounding to 3 bits is one unit after it
            tolerance = Tolerance(tolerance.relative + 0.125, tolerance.absolute + 2.0**-9, tolerance.why)
        torch.testing.assert_close(
            left.double(),
            right.double(),
            rtol=tolerance.relative,
            atol=tolerance.absolute,
            msg=lambda text: f"{place}: {text}",
        )


def compare_outcomes(
    got: dict[str, Tensor], wanted: dict[str, Tensor], before: dict[str, Tensor], tolerance: Tolerance, place: str
) -> None:
    """`before`: the arguments as they were. What the meaning has not changed may not change in a single bit."""
    assert list(got) == list(wanted), f"{place}: gives {list(got)}, not {list(wanted)}"
    for name, right in wanted.items():
        is_fixed = name in before and equal_bits(before[name], right)
        compare(got[name].cpu(), right, UNTOUCHED if is_fixed else tolerance, f"{place} {name}")


def place_of(op: Op[Any], case: Case, dtype: torch.dtype) -> str:
    return f"{op.name}/{case.name}/{str(dtype).removeprefix('torch.')}"


def check(impl: Impl[Any], device: torch.device, dtype: torch.dtype) -> int:
    """Holds the implementation against all cases in one dtype; returns how many. Raises AssertionError."""
    if dtype not in impl.op.tolerances or impl.refuses(facts(device, dtype)) is not None:
        return 0
    for case in impl.op.cases:
        before, arguments = outcome(None, case.make(dtype)), case.make(dtype)
        wanted = outcome(impl.op.meaning(*arguments), arguments)
        moved = convert(case.make(dtype), Mover(device))
        got = outcome(impl.run(*moved), moved)
        compare_outcomes(got, wanted, before, impl.op.tolerances[dtype], place_of(impl.op, case, dtype))
    return len(impl.op.cases)
