"""When a step does not fit the device's memory: it is run again in smaller pieces. Called by the engine; no state.

Rows are brought up to a plan once, before this. A piece may be run again, since it counts as computed only when it has
succeeded. What not even the smallest pieces can run is given up, row by row.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from common.columns import pack_i32
from common.logprobs import StepLogprobs
from common.protocol import RowFault
from services.worker.state import Ints, Step

log = logging.getLogger("worker")

SMALLEST = 16  # tokens of one row in one piece
SIGNS = ("out of memory", "alloc_failed", "can't allocate memory")  # of CUDA, HIP, their libraries, and a CPU


class Tokens(Protocol):
    """What a run gives: sampled tokens on their way to the host."""

    @property
    def faults(self) -> Sequence[RowFault]: ...

    def settle(self) -> None: ...

    def ready(self) -> bool: ...

    def tokens(self) -> bytes: ...

    def counts(self) -> tuple[bytes, bytes]: ...

    def logprobs(self) -> StepLogprobs | None: ...


class Outcome:
    """A step's tokens, in the plan's order; `failed`: _i32 places of rows that were given up."""

    def __init__(
        self,
        pending: Tokens | bytes,
        failed: bytes = b"",
        counts: tuple[bytes, bytes] = (b"", b""),
        faults: Sequence[RowFault] = (),
        logprobs: StepLogprobs | None = None,
    ) -> None:
        self._pending = pending
        self._counts, self._logprobs = counts, logprobs
        self.failed = failed
        self._faults = faults

    @property
    def faults(self) -> Sequence[RowFault]:
        """Of rows whose tokens mean nothing for reasons of their own; known with the tokens."""
        return self._faults if isinstance(self._pending, bytes) else self._pending.faults

    def settle(self) -> None:
        """Starts what waited for the step before, for which it waits."""
        if not isinstance(self._pending, bytes):
            self._pending.settle()

    def ready(self) -> bool:
        """Whether `tokens` would return without waiting."""
        return isinstance(self._pending, bytes) or self._pending.ready()

    def tokens(self) -> bytes:
        """_i32; waits for the device. Kept, since the place that the device wrote them to serves later steps too."""
        if not isinstance(self._pending, bytes):
            tokens, self._counts = self._pending.tokens(), self._pending.counts()
            self._faults = self._pending.faults
            self._logprobs = self._pending.logprobs()
            self._pending = tokens
        return self._pending

    def counts(self) -> tuple[bytes, bytes]:
        """Of a step with drafts, one byte per row: tokens, and drafts that were tried. Waits for the device."""
        self.tokens()
        return self._counts

    def logprobs(self) -> StepLogprobs | None:
        """Of the rows that want them and have not failed. Waits for the device."""
        self.tokens()
        return self._logprobs


def is_out_of_memory(error: RuntimeError) -> bool:
    """Any other device error leaves the device in a state that nobody knows."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error).lower() for sign in SIGNS)


class Piece(NamedTuple):
    step: Step
    places: Ints  # of its rows in the plan

    def halves(self) -> "tuple[Piece, Piece] | None":
        """Two pieces that, one after the other, do the same; about half the tokens each. None: it is small enough.

        Rows stay in order and whole; a single row is cut, and its first half samples nothing.
        """
        step, rows = self.step, len(self.places)
        if rows > 1:
            ends = np.cumsum(step.counts)
            cut = min(int(np.searchsorted(ends, ends[-1] / 2)) + 1, rows - 1)
            return self._rows(slice(cut)), self._rows(slice(cut, None))
        if not rows or step.counts[0] < 2 * SMALLEST:
            return None
        half = step.counts // 2
        first = step._replace(counts=half, samples=np.zeros(1, np.bool_))
        second = step._replace(positions=step.positions + half, counts=step.counts - half)
        return Piece(first, self.places), Piece(second, self.places)

    def _rows(self, part: slice) -> "Piece":
        slots, positions, counts, samples, drafting = self.step
        drafting = len(slots[:drafting][part])
        return Piece(Step(slots[part], positions[part], counts[part], samples[part], drafting), self.places[part])


class Retry:
    """One step's way through a shortage.

    `run` may raise for lack of memory; `free` waits for the device and returns unused memory to it; `give_up` counts a
    step as computed, with tokens that mean nothing. Each piece's tokens are waited for.
    """

    def __init__(
        self, run: Callable[[Step], Tokens], free: Callable[[], None], give_up: Callable[[Step], None]
    ) -> None:
        self._run, self._free, self._count = run, free, give_up
        self._parts: list[bytes] = []
        self._counts: list[tuple[bytes, bytes]] = []
        self._faults: list[RowFault] = []
        self._logprobs: StepLogprobs | None = None
        self._failed: set[int] = set()

    def __call__(self, step: Step) -> Outcome:
        """`step` has just failed. Raises what `run` raises for other reasons than memory."""
        self._divide(Piece(step, np.arange(len(step.slots))))
        return self._outcome(step)

    def give_up(self, step: Step) -> Outcome:
        """`step` has just failed, and has left its rows so that nothing can be run again."""
        self._free()
        self._drop(Piece(step, np.arange(len(step.slots))))
        return self._outcome(step)

    def _outcome(self, step: Step) -> Outcome:
        rows, pieces, failed = len(step.slots), len(self._parts), sorted(self._failed)
        log.warning("no memory for a step of %d rows: ran in %d pieces, %d rows failed", rows, pieces, len(failed))
        counts, tried = (
            (b"".join(column) for column in zip(*self._counts, strict=True)) if step.drafting else (b"", b"")
        )
        told = (counts, tried), self._faults, self._logprobs
        return Outcome(b"".join(self._parts), pack_i32(failed), *told)

    def _divide(self, piece: Piece) -> None:
        """For a piece that has failed."""
        self._free()
        halves = piece.halves()
        if halves is not None:
            for half in halves:
                self._attempt(half)
        elif (tokens := attempt(piece.step, self._run)) is not None:
            self._take(piece, tokens)
        else:
            self._drop(piece)

    def _attempt(self, piece: Piece) -> None:
        if self._failed.intersection(piece.places.tolist()):  # the same row's first half has failed
            self._drop(piece)
            return
        tokens = attempt(piece.step, self._run)
        if tokens is None:
            self._divide(piece)
        else:
            self._take(piece, tokens)

    def _take(self, piece: Piece, tokens: Tokens) -> None:
        self._parts.append(tokens.tokens())
        counts, tried = tokens.counts()
        samples = int(piece.step.samples.sum())
        self._counts.append((counts or b"\x01" * samples, tried or bytes(samples)))
        self._faults += [RowFault(int(piece.places[fault.place]), fault.message) for fault in tokens.faults]
        if (found := tokens.logprobs()) is not None:
            self._logprobs = _joined(self._logprobs or StepLogprobs(), found, piece.places)

    def _drop(self, piece: Piece) -> None:
        self._count(piece.step)
        self._failed.update(piece.places.tolist())
        samples = int(piece.step.samples.sum())
        self._parts.append(bytes(4 * samples))
        self._counts.append((b"\x01" * samples, bytes(samples)))


def attempt(step: Step, run: Callable[[Step], Tokens]) -> Tokens | None:
    """None: there was not enough memory. What the attempt held is free again when this returns."""
    try:
        return run(step)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def _joined(before: StepLogprobs, found: StepLogprobs, places: Ints) -> StepLogprobs:
    """`found`: of the next piece, whose rows have these places in the plan."""
    prompts = dict(before.prompts)
    for row, (first, records) in found.prompts.items():
        begin, known = prompts.get(place := int(places[row]), (first, b""))
        prompts[place] = begin, known + records
    vectors = before.vectors | {int(places[row]): vector for row, vector in found.vectors.items()}
    return StepLogprobs(before.tokens + found.tokens, prompts, vectors)
