"""Reads runs of numbers from checkpoint files to a device. Owner: the tensors of one opened checkpoint, at start.

`pread` by several threads, not a mapped file: no page is mapped, so that a process holds no more of a file than what is
on its way. To a GPU that is a ring of pinned buffers, whose copies run while the next one is filled; what is stored in
another dtype is widened on the device. One thread at a time asks.
"""

import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common.errors import ConfigError

SLOT_BYTES = 16 << 20
SLOTS = 4
SLICE_BYTES = 2 << 20  # of one thread: below that, handing it over takes longer than reading it
MOST_THREADS = 8
CPU = torch.device("cpu")


class Place(NamedTuple):
    """A tensor in a file: its first byte, and what is stored there, row by row."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Slot:
    def __init__(self, pinned: bool) -> None:
        self.bytes = torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self.copied: Any = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]


class FileReader:
    """`device`: where `read` leaves tensors. `threads`: 0, one for each core, up to eight."""

    def __init__(self, device: torch.device = CPU, threads: int = 0) -> None:
        self._device = device
        self._threads = threads or min(len(os.sched_getaffinity(0)), MOST_THREADS)
        self._files: dict[Path, int] = {}
        self._slots: list[_Slot] = []
        self._turn = 0
        self._pool: ThreadPoolExecutor | None = None

    def read(self, place: Place, dtype: torch.dtype, window: Sequence[slice] = ()) -> torch.Tensor:
        """A new tensor on the device. `window`: what of each dimension is read; (): all. Raises ConfigError."""
        if self._device.type == "cpu" and dtype == place.dtype and not _cuts_rows(place, window):
            return self.stored(place, window)
        first, count = _range(place, window)
        inner = tuple(window[1:])
        row = place.shape[1:] if inner else ()
        # without a cut within rows, where one of them begins is of no account
        size, begin = (count, first) if inner else (count * prod(place.shape[1:]), first * prod(place.shape[1:]))
        shape = (count, *(part.stop - part.start for part in inner)) if inner else (size,)
        result = torch.empty(shape, dtype=dtype, device=self._device)
        width = prod(row) * place.dtype.itemsize
        step = max(SLOT_BYTES // width, 1) if width else 1
        for at in range(0, size, step):
            some = min(step, size - at)
            held = self._staged(place, (begin + at) * width, some * width).view(place.dtype).view(some, *row)
            result[at : at + some] = held[(slice(None), *inner)]
        return result if inner else result.view(count, *place.shape[1:]) if place.shape else result.view(())

    def stored(self, place: Place, window: Sequence[slice] = ()) -> torch.Tensor:
        """A new tensor of the CPU's, in the file's dtype."""
        first, count = _range(place, window)
        shape = (count, *place.shape[1:]) if place.shape else ()
        result = torch.empty(shape, dtype=place.dtype)
        self._fill(result.view(-1).view(torch.uint8), place, first * prod(place.shape[1:]) * place.dtype.itemsize)
        return result[(slice(None), *window[1:])].contiguous() if _cuts_rows(place, window) else result

    def _staged(self, place: Place, begin: int, count: int) -> torch.Tensor:
        """Bytes of the tensor on the device, valid until SLOTS more have been asked for."""
        if count > SLOT_BYTES:
            held = torch.empty(count, dtype=torch.uint8)
            self._fill(held, place, begin)
            return held.to(self._device)
        pinned = self._device.type != "cpu"
        if len(self._slots) < SLOTS:
            self._slots.append(_Slot(pinned))
        slot = self._slots[self._turn % len(self._slots)]
        self._turn = (self._turn + 1) % SLOTS
        if not pinned:
            self._fill(slot.bytes[:count], place, begin)
            return slot.bytes[:count]
        slot.copied.synchronize()
        self._fill(slot.bytes[:count], place, begin)
        held = slot.bytes[:count].to(self._device, non_blocking=True)
        slot.copied.record()
        return held

    def _fill(self, target: torch.Tensor, place: Place, begin: int) -> None:
        """target: uint8, of the CPU's; from `begin` on, counted from the tensor's first byte."""
        content, first = target.numpy(), place.offset + begin
        slices = min(max(len(content) // SLICE_BYTES, 1), self._threads)
        file = self._file(place.path)
        if slices == 1:
            _pread(file, place.path, content, first)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "weights")
        bounds = [len(content) * i // slices for i in range(slices + 1)]
        parts = [
            self._pool.submit(_pread, file, place.path, content[low:high], first + low)
            for low, high in pairwise(bounds)
        ]
        for part in parts:
            part.result()

    def _file(self, path: Path) -> int:
        found = self._files.get(path)
        if found is None:
            try:
                found = self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
            weakref.finalize(self, os.close, found)
        return found


def _pread(file: int, path: Path, content: "np.ndarray[Any, np.dtype[np.uint8]]", offset: int) -> None:
    done = 0
    while done < len(content):
        try:
            count = os.preadv(file, [content[done:].data], offset + done)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read at byte {offset + done}: {error.strerror}") from error
        if not count:
            raise ConfigError(f"{path} ends at byte {offset + done}: it has become shorter since it was opened")
        done += count


def _range(place: Place, window: Sequence[slice]) -> tuple[int, int]:
    """First row, and how many; a single number is one row."""
    if not place.shape:
        return 0, 1
    return (window[0].start, window[0].stop - window[0].start) if window else (0, place.shape[0])


def _cuts_rows(place: Place, window: Sequence[slice]) -> bool:
    return any((part.start, part.stop) != (0, size) for part, size in zip(window[1:], place.shape[1:], strict=False))
