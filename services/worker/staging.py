"""Small host arrays on their way to the device, all of a step in one copy. Owner: the runner, one at a time.

On a GPU the copy runs on a side stream while the device still works on the step before. Each step has its own pinned
buffer and its own place on the device; a buffer is written again only when the copy out of it, and the step that read
its place, are over. On a CPU the tensors are the arrays.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
Blank = Callable[[], Sequence[Array]]
ALIGNMENT = 16
DEPTH = 4  # steps whose inputs may be on the device at once; two plans are in flight
TORCH_TYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "float32": torch.float32,
    "bool": torch.bool,
}


class Staging(Protocol):
    def put(self, values: Array) -> Tensor:
        """The device tensor of `values`; it may be read by what is launched after `send`."""
        ...

    def columns(self, key: Hashable, blank: Blank) -> tuple[tuple[Array, ...], Tensor]:
        """First in a step: arrays like `blank()` to write into before `send`, and all of them as one uint8 tensor.

        They lie as `offsets` says and hold whatever an earlier step wrote. `key`: equal for equal blanks.
        """
        ...

    def send(self) -> None:
        """Starts the copy of all that was put since `done`."""
        ...

    def done(self) -> None:
        """Nothing launched from here on reads what was put."""
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

    def put(self, values: Array) -> Tensor:
        return torch.from_numpy(values)

    def columns(self, key: Hashable, blank: Blank) -> tuple[tuple[Array, ...], Tensor]:
        like = blank()
        starts, size = offsets(like)
        together = torch.zeros(size, dtype=torch.uint8)
        return arrays(together.numpy(), starts, like), together

    def send(self) -> None: ...

    def done(self) -> None: ...


class _Slot:
    """One step's buffers and when they are free again."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.pinned.numpy()
        self.device = torch.empty(size, dtype=torch.uint8, device=device)
        self.copied, self.read = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.known: dict[Hashable, tuple[tuple[Array, ...], Tensor]] = {}


class DeviceStaging:
    """`size`: bytes of an ordinary step; what does not fit goes a slower way of its own."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._slots = [_Slot(aligned(size), device) for _ in range(DEPTH)]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._main = torch.cuda.current_stream(device)
        self._device = device
        self._turn = 0
        self._used = 0
        self._sent = 0

    @property
    def slot(self) -> _Slot:
        return self._slots[self._turn]

    def put(self, values: Array) -> Tensor:
        offset, slot = self._used, self.slot
        if offset == 0:
            slot.copied.synchronize()  # four steps ago: over long since
        if offset + values.nbytes > len(slot.bytes):
            return torch.from_numpy(values).pin_memory().to(self._device, non_blocking=True)
        slot.bytes[offset : offset + values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._used = aligned(offset + values.nbytes)
        return view(slot.device, offset, values)

    def columns(self, key: Hashable, blank: Blank) -> tuple[tuple[Array, ...], Tensor]:
        slot = self.slot
        slot.copied.synchronize()
        found = slot.known.get(key)
        if found is None:
            like = blank()
            starts, size = offsets(like)
            assert size <= len(slot.bytes), f"{size} bytes of inputs, {len(slot.bytes)} staged"
            found = slot.known[key] = (arrays(slot.bytes, starts, like), slot.device[:size])
        self._used, self._sent = found[1].shape[0], 0
        return found

    def send(self) -> None:
        if self._sent == self._used:
            return
        slot = self.slot
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.read)
            part = slice(self._sent, self._used)
            slot.device[part].copy_(slot.pinned[part], non_blocking=True)
            slot.copied.record(self._stream)
        self._main.wait_event(slot.copied)
        self._sent = self._used

    def done(self) -> None:
        self.slot.read.record(self._main)
        self._turn = (self._turn + 1) % DEPTH
        self._used = self._sent = 0


def staging(size: int, device: torch.device) -> Staging:
    return HostStaging() if device.type == "cpu" else DeviceStaging(size, device)


def offsets(columns: Sequence[Array]) -> tuple[list[int], int]:
    """Where DeviceStaging lays `columns` that are put in this order at the start of a step, and where they end."""
    found, end = [], 0
    for column in columns:
        found.append(end)
        end = aligned(end + column.nbytes)
    return found, end
