"""How a Triton implementation is held against its op's meaning: every case, dtype and tensor, with traps around them.

The meaning always runs on the CPU. The implementation runs there too, interpreted, or on the GPU: then twice, and a
third time from a replayed graph. Its arguments lie between guard bands of NaN that it may neither use nor change;
what it allocates starts as NaN.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Facts, Impl, Tolerance

GUARD = 256  # elements before and after each storage; keeps the alignment that torch gives
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EXACT = Tolerance(0.0, 0.0, "not written")


def facts(device: torch.device, dtype: torch.dtype) -> Facts:
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


def poison(tensor: Tensor) -> Tensor:
    """NaN, or all bits set."""
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


class Guarded:
    """Copies of tensors on a device, in their own strides, views of one storage still views of one storage."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}
        self._wide: list[tuple[Tensor, Tensor]] = []

    def copy(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        size = storage.nbytes() // tensor.element_size()
        key = (storage.data_ptr(), tensor.dtype)
        if key not in self._storages:
            kept = poison(torch.empty(size + 2 * GUARD, dtype=tensor.dtype, device=self.device))
            kept[GUARD : GUARD + size] = tensor.as_strided((size,), (1,), 0).to(self.device)
            self._storages[key] = kept
        return self._storages[key].as_strided(tensor.shape, tensor.stride(), GUARD + tensor.storage_offset())

    def spread(self, tensor: Tensor) -> Tensor:
        """The tensor as columns of a wider one, whose other columns are NaN and must stay so."""
        width = tensor.shape[-1]
        padding = -width % 16 + 16
        wide = poison(torch.empty(*tensor.shape[:-1], width + padding, dtype=tensor.dtype, device=self.device))
        wide[..., :width] = tensor
        self._wide.append((wide, wide[..., width:]))
        return wide[..., :width]

    def untouched(self) -> bool:
        bands = [band for _, band in self._wide]
        bands += [part for kept in self._storages.values() for part in (kept[:GUARD], kept[-GUARD:])]
        return all(equal_bits(band, poison(torch.empty_like(band))) for band in bands)


def equal_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.numel():
        return True
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """What torch gives without writing to it is NaN, so that an element that a kernel forgets shows."""
    patch = pytest.MonkeyPatch()
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, original=original, **options: poison(original(*args, **options)))
    try:
        # numpy, which interprets, warns of masked lanes' numbers
        with np.errstate(all="ignore"):
            yield
    finally:
        patch.undo()


class Holder:
    """`hold(impl)` checks all of the op's cases in all of its dtypes.

    `cases` replaces them; `strided` names arguments (by position) that come as columns of a wider tensor; `graph` says
    whether a GPU also captures and replays it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(
        self, impl: Impl[Any], *, cases: Sequence[Case] | None = None, strided: Sequence[int] = (), graph: bool = True
    ) -> None:
        ran = 0
        for dtype in DTYPES:
            if dtype not in impl.op.tolerances or impl.refuses(facts(self.device, dtype)) is not None:
                continue
            for case in impl.op.cases if cases is None else cases:
                self._case(impl, case, dtype, strided, graph)
                ran += 1
        assert ran, f"{impl.op.name}: {impl.provider} refuses every dtype on {self.device}"

    def _case(self, impl: Impl[Any], case: Case, dtype: torch.dtype, strided: Sequence[int], graph: bool) -> None:
        place = f"{impl.op.name}/{case.name}/{str(dtype).removeprefix('torch.')}"
        before, arguments = dict(tensors(case.make(dtype), "argument")), case.make(dtype)
        wanted = flat(impl.op.meaning(*arguments), arguments)
        first = self._run(impl, case, dtype, strided, place)
        assert list(first) == list(wanted), f"{place}: gives {list(first)}, not {list(wanted)}"
        for name, right in wanted.items():
            # what the meaning leaves alone must not change at all
            fixed = name in before and equal_bits(before[name], right)
            tolerance = EXACT if fixed else impl.op.tolerances[dtype]
            compare(first[name].cpu(), right, tolerance, f"{place} {name}")
        if self.device.type != "cpu":
            for captured in (False, True) if graph else (False,):
                again = self._run(impl, case, dtype, strided, place, captured)
                for name, tensor in first.items():
                    how = "replayed from a graph" if captured else "run again"
                    assert equal_bits(tensor, again[name]), f"{place} {name}: other bits when {how}"

    def _run(
        self,
        impl: Impl[Any],
        case: Case,
        dtype: torch.dtype,
        strided: Sequence[int],
        place: str,
        captured: bool = False,
    ) -> dict[str, Tensor]:
        """Results and arguments after one run on fresh arguments."""
        guarded = Guarded(self.device)
        arguments = tuple(
            convert(value, guarded.spread if position in strided else guarded.copy)
            for position, value in enumerate(case.make(dtype))
        )
        with poisoned_allocations():
            result = replay(impl, arguments) if captured else impl.run(*arguments)
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        assert guarded.untouched(), f"{place}: writes outside of its arguments"
        return flat(result, arguments)


def flat(result: Any, arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    return dict(tensors(result, "result")) | dict(tensors(arguments, "argument"))


def replay(impl: Impl[Any], arguments: tuple[Any, ...]) -> Any:
    """A run before this one has compiled the kernels."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
        with torch.cuda.graph(graph):
            result = impl.run(*arguments)
    graph.replay()
    torch.cuda.synchronize()
    return convert(result, torch.clone)  # the graph's memory goes with it


def compare(left: Tensor, right: Tensor, tolerance: Tolerance, place: str) -> None:
    assert left.dtype == right.dtype, f"{place} is {left.dtype}, not {right.dtype}"
    assert left.shape == right.shape, f"{place} is {tuple(left.shape)}, not {tuple(right.shape)}"
    if tolerance.relative == tolerance.absolute == 0.0 or not right.is_floating_point():
        assert equal_values(left, right), f"{place}: {differences(left, right)}"
        return
    torch.testing.assert_close(
        left.double(),
        right.double(),
        rtol=tolerance.relative,
        atol=tolerance.absolute,
        msg=lambda text: f"{place}: {text}",
    )


def equal_values(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.double(), right.double()) if right.is_floating_point() else torch.equal(left, right)


def differences(left: Tensor, right: Tensor) -> str:
    wrong = (left.double() != right.double()).nonzero()
    first = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {right.numel()} differ; at {first} {left[first].item()}, not {right[first].item()}"
