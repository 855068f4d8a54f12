"""How a Triton implementation is held against its op's meaning: every case, dtype and tensor, with traps around them.

The meaning always runs on the CPU. The implementation runs there too, interpreted, or on the GPU: then twice, and a
third time from a replayed graph. Its arguments lie between guard bands of NaN that it may neither use nor change;
what it allocates starts as NaN.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.gate import compare_outcomes, convert, equal_bits, facts, outcome, place_of
from services.worker.kernels.registry import Case, Impl

GUARD = 256  # elements before and after each storage; keeps the alignment that torch gives
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Refusals for want of a unit, by name: this is imported before Triton interprets, and must import no kernel.
LACKING = ("needs_fp4_unit", "needs_halves", "needs_scaled_dot", "tried_in_bf16")


def poison(tensor: Tensor) -> Tensor:
    """NaN, or all bits set."""
    if tensor.dtype == getattr(torch, "float4_e2m1fn_x2", None):  # nothing can be done with it but to name it otherwise
        tensor.view(torch.uint8).fill_(0xFF)
        return tensor
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
    """`hold(impl)` checks all of the op's cases in those of its dtypes that are among `dtypes` (see `_of`).

    `cases` replaces them; `strided` names arguments (by position) that come as columns of a wider tensor; `graph` says
    whether a GPU also captures and replays it.
    """

    def __init__(self, device: torch.device, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
        self.device, self.dtypes = device, dtypes

    def __call__(
        self, impl: Impl[Any], *, cases: Sequence[Case] | None = None, strided: Sequence[int] = (), graph: bool = True
    ) -> None:
        ran = 0
        taken = [d for d in self.dtypes if d in impl.op.tolerances and impl.refuses(facts(self.device, d)) is None]
        for number, case in enumerate(impl.op.cases if cases is None else cases):
            for dtype in self._of(number, taken) if number else taken:
                self._case(impl, case, dtype, strided, graph)
                ran += 1
        if not ran and self.device.type == "cuda":
            # only what the chip lacks or the op is not for: the interpreter, which lacks nothing, holds it in CI
            known = impl.refuses.__name__ in LACKING or impl.op.tolerances.keys().isdisjoint(self.dtypes)
            assert known, f"{impl.op.name}: {impl.refuses(facts(self.device, self.dtypes[0]))}"
            pytest.skip(str(impl.refuses(facts(self.device, self.dtypes[0])) or f"not in {self.dtypes[0]}"))
        assert ran, f"{impl.op.name}: {impl.provider} refuses every dtype on {self.device}"

    def _of(self, number: int, taken: Sequence[torch.dtype]) -> list[torch.dtype]:
        """In which of them a later case runs. Interpreted, two halves differ in how they round alone: by turns."""
        halves = [dtype for dtype in taken if dtype.itemsize == 2]
        left_out = halves[number % 2 :][:1] if self.device.type == "cpu" and len(halves) == 2 else []
        return [dtype for dtype in taken if dtype not in left_out]

    def _case(self, impl: Impl[Any], case: Case, dtype: torch.dtype, strided: Sequence[int], graph: bool) -> None:
        place = place_of(impl.op, case, dtype)
        before, arguments = outcome(None, case.make(dtype)), case.make(dtype)
        wanted = outcome(impl.op.meaning(*arguments), arguments)
        first = self._run(impl, case, dtype, strided, place)
        compare_outcomes(first, wanted, before, impl.op.tolerances[dtype], place)
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
        return outcome(result, arguments)


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
