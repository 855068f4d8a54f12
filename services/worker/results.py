"""Sampled tokens on their way to the host: lines of its memory that the device writes, one per step, used by turns.

Owner: the runner. What a turn's step has written stays until the turn comes again, and nobody waits before it is asked
for: an event says that it is there.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.logprobs import StepLogprobs
from common.protocol import RowFault
from services.worker.reports import Reporter, StepReports
from services.worker.staging import RING


class StepTokens:
    """The sampled tokens of one step: `places` [S] of int32 `line` in memory of the host, there after `event`."""

    faults: Sequence[RowFault] = ()

    def __init__(
        self,
        line: npt.NDArray[np.int32],
        places: npt.NDArray[np.int64],
        event: torch.cuda.Event | None,
        sizes: npt.NDArray[np.int64] | None = None,
        reports: StepReports | None = None,
    ) -> None:
        """`sizes`: entries of each row in a step with drafts; the second half of the line then says which are kept."""
        self._line, self._places, self._event, self._sizes = line, places, event, sizes
        self._reports = reports

    def settle(self) -> None:
        """There is nothing that waited for the step before."""

    def ready(self) -> bool:
        """Whether `tokens` would return without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def tokens(self) -> bytes:
        """_i32 sampled tokens in the plan's order of rows; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._line[self._places if self._sizes is None else self._places[self._kept()]].tobytes()

    def counts(self) -> tuple[bytes, bytes]:
        """With `tokens`: one byte per row, how many it has, and how many drafts were tried; empty without drafts."""
        if self._sizes is None:
            return b"", b""
        starts = np.cumsum(self._sizes) - self._sizes
        kept = np.add.reduceat(self._kept(), starts, dtype=np.int64)
        return kept.astype(np.uint8).tobytes(), (self._sizes - 1).astype(np.uint8).tobytes()

    def logprobs(self) -> StepLogprobs | None:
        """With `tokens`."""
        if self._reports is None:
            return None
        return self._reports.read(None if self._sizes is None else self._kept())

    def _kept(self) -> npt.NDArray[np.bool_]:
        kept: npt.NDArray[np.bool_] = self._line[len(self._line) // 2 + self._places] != 0
        return kept


class Results:
    """Lines of memory that the device writes sampled tokens to and the host reads; one per step, used by turns.

    Beside them, where rows want them, log-probabilities.
    """

    def __init__(self, width: int, device: torch.device, reporter: Reporter) -> None:
        on_gpu = device.type != "cpu"
        self.lines = torch.zeros(RING, width, dtype=torch.int32, pin_memory=on_gpu)
        self.turn, self.reporter = 0, reporter
        self._host = self.lines.numpy()
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        self._events = [torch.cuda.Event() for _ in range(RING)] if on_gpu else []  # type: ignore[no-untyped-call]

    def next_turn(self) -> int:
        """When the step which had it before is over, as it is unless nobody has asked for its tokens."""
        self.turn = (self.turn + 1) % RING
        if self._events:
            self._events[self.turn].synchronize()
        self.reporter.start()
        return self.turn

    def taken(self, places: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64] | None = None) -> StepTokens:
        """This turn's tokens at `places`, when all that was launched so far is done."""
        line, reports = self._host[self.turn], self.reporter.taken()
        if self._stream is None:
            return StepTokens(line.copy(), places, None, sizes, reports)
        event = self._events[self.turn]
        event.record(self._stream)
        return StepTokens(line, places, event, sizes, reports)
