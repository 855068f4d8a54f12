"""Small host arrays on their way to the device, all of a step in one copy. Owner: the runner, one at a time.

On a GPU the copy runs on a side stream while the device still works on the step before. Each step has its own pinned
buffer and its own place on the device, by turns; who begins a step knows that the step which had its turn before is
over. On a CPU the tensors are the arrays.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
ALIGNMENT = 16
RING = 16  # steps whose results may not have been taken yet; eight plans at most are in flight
TORCH_TYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "float32": torch.float32,
    "bool": torch.bool,
}


class Staging(Protocol):
    def begin(self, turn: int) -> None:
        """A step begins; nothing that is launched reads what was put in this turn before. turn: 0 .. RING - 1."""
        ...

    def put(self, values: Array) -> Tensor:
        """The device tensor of `values`; for what is launched after `send`, until the turn comes again."""
        ...

    def send(self) -> None:
        """Starts the copy of all that was put since the last one."""
        ...


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def view(buffer: Tensor, offset: int, like: Array) -> Tensor:
    """The bytes of `like` at `offset` of a uint8 buffer, in its dtype and shape."""
    return buffer[offset : offset + like.nbytes].view(TORCH_TYPES[like.dtype.name]).view(like.shape)


def arrays(buffer: npt.NDArray[np.uint8], starts: Sequence[int], like: Sequence[Array]) -> tuple[Array, ...]:
    """Parts of `buffer` in the dtypes and shapes of `like`."""
    return tuple(
        buffer[start : start + column.nbytes].view(column.dtype).reshape(column.shape)
        for start, column in zip(starts, like, strict=True)
    )


class HostStaging:
    """For a CPU."""

    def begin(self, turn: int) -> None: ...

    def put(self, values: Array) -> Tensor:
        return torch.from_numpy(values)

    def send(self) -> None: ...


class _Place:
    """One turn's memory, and views of what begins it: of the inputs of a captured step, most often."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.pinned.numpy()
        self.device = torch.empty(size, dtype=torch.uint8, device=device)
        self._first: dict[int, tuple[Tensor, Tensor]] = {}

    def part(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """On the device, and pinned."""
        if start:
            return self.device[start:end], self.pinned[start:end]
        if end not in self._first:
            self._first[end] = self.device[:end], self.pinned[:end]
        return self._first[end]


class DeviceStaging:
    """`size`: bytes of an ordinary step; what does not fit goes a slower way of its own."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._places = [_Place(aligned(size), device) for _ in range(RING)]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._main = torch.cuda.current_stream(device)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._device = device
        self.begin(0)

    def begin(self, turn: int) -> None:
        self._place = self._places[turn]
        self._used = self._sent = 0

    def put(self, values: Array) -> Tensor:
        offset, place = self._used, self._place
        end = offset + values.nbytes
        if end > len(place.bytes):
            return torch.from_numpy(values).pin_memory().to(self._device, non_blocking=True)
        place.bytes[offset:end] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._used = aligned(end)
        return view(place.device, offset, values) if values.dtype != np.uint8 else place.part(offset, end)[0]

    def send(self) -> None:
        if self._sent == self._used:
            return
        target, source = self._place.part(self._sent, self._used)
        torch.cuda.set_stream(self._stream)
        try:
            target.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(self._main)
        self._copied.record(self._stream)
        self._main.wait_event(self._copied)
        self._sent = self._used


def staging(size: int, device: torch.device) -> Staging:
    return HostStaging() if device.type == "cpu" else DeviceStaging(size, device)


def offsets(columns: Sequence[Array]) -> tuple[list[int], int]:
    """Where DeviceStaging lays `columns` that are put in this order at the start of a step, and where they end."""
    found, end = [], 0
    for column in columns:
        found.append(end)
        end = aligned(end + column.nbytes)
    return found, end
