"""Sequences that have ended, and the names under which all are asked for. Owned by the core's state.

A tokenizer may die with a terminal in its hands, so ended sequences keep their output for whoever takes over, bounded
by number and by tokens. A sequence keeps its origin, the first id it had; `names` has the newest where that is another.
"""

from collections import OrderedDict, deque
from typing import NamedTuple

import msgspec

from common.protocol import Finished, FinishReason
from services.scheduler.blocks import TOKEN_BYTES
from services.scheduler.figures import Figures
from services.scheduler.request import Journal, Sequence, silent

SEQUENCES_KEPT = 4096
TOKENS_KEPT = 1 << 22  # of their outputs, 16 MiB


class Ended(NamedTuple):
    origin: int
    output: bytes  # _i32
    finished: Finished
    log: deque[tuple[float, str]]
    records: bytes = b""  # log-probabilities of the output
    prompt_records: bytes = b""

    @property
    def num_bytes(self) -> int:
        return len(self.output) + len(self.records) + len(self.prompt_records) + len(self.finished.vector)


class Traced(NamedTuple):
    """A sequence of a request that is recorded, when it ended."""

    sequence: Sequence
    finished: Finished
    ended_s: float


class Past:
    def __init__(self) -> None:
        self.names: dict[int, int] = {}  # by origin; open sequences and those kept here
        self._ended: OrderedDict[int, Ended] = OrderedDict()
        self._num_bytes = 0
        self.journal: Journal = silent  # hears of all sequences' stories
        self.figures = Figures()
        self.traced: list[Traced] = []  # since the shell looked

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._ended

    def __len__(self) -> int:
        return len(self._ended)

    def name(self, seq_id: int) -> int:
        """The id under which a sequence runs, or ran, that was once known as `seq_id`."""
        return self.names.get(seq_id, seq_id)

    def find(self, seq_id: int) -> Ended | None:
        return self._ended.get(self.name(seq_id))

    def rename(self, origin: int, seq_id: int) -> Ended | None:
        """Somebody takes over a sequence that has ended; None if it is not kept, or was aborted."""
        old = self.name(origin)
        ended = self._ended.get(old)
        if ended is None or ended.finished.reason is FinishReason.ABORT:
            return None
        del self._ended[old]
        ended = ended._replace(finished=msgspec.structs.replace(ended.finished, seq_id=seq_id))
        self._ended[seq_id] = ended
        self.names[origin] = seq_id
        return ended

    def add(self, sequence: Sequence, finished: Finished) -> None:
        """What nobody waits for any more keeps only its story."""
        ended = Ended(sequence.origin, b"", finished, sequence.log)
        if finished.reason is not FinishReason.ABORT:
            output = bytes(sequence.tokens[len(sequence.request.prompt) :])
            records, prompt_records = bytes(sequence.records), bytes(sequence.prompt_records)
            ended = ended._replace(output=output, records=records, prompt_records=prompt_records)
        self._ended[sequence.seq_id] = ended
        self._num_bytes += ended.num_bytes
        while len(self._ended) > SEQUENCES_KEPT or self._num_bytes > TOKENS_KEPT * TOKEN_BYTES:
            self.forget(next(iter(self._ended)))

    def forget(self, seq_id: int) -> None:
        """Fine if it is not kept."""
        ended = self._ended.pop(seq_id, None)
        if ended is None:
            return
        self._num_bytes -= ended.num_bytes
        if self.names.get(ended.origin) == seq_id:
            del self.names[ended.origin]
