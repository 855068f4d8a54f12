"""The rows of the worker, and above all those that compute exactly one token in every decode step.

Owned by the core's state. Because every STEPPING row takes part in every decode plan, one shared counter, the tick,
tells all their positions: position = position_base + tick, and nothing per row changes from step to step. Rows are
grouped by the tick (modulo block_tokens) at which they enter a new block, so a step touches only those in Python.
Results are kept per tick in the history until a block is full. Invariants: `stepping`, `_phases` and `_ends` hold the
same rows; `_epochs[slot]` is the epoch of the living row or -1; ticks are received in the order they were planned.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.scheduler.request import NEVER, Row

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]


class Roster(msgspec.Struct, frozen=True):
    """The STEPPING rows at one moment, by ascending slot, as columns of length `size`. Plans share it."""

    size: int
    slots: I64
    epochs: I64
    tick: int  # positions and indices below are those of this tick
    positions: I32
    indices: I32  # output token number that this tick samples
    seq_ids: NDArray[np.uint64]
    tokenizers: NDArray[np.uint8] | None  # None: all rows belong to one tokenizer
    tokenizer: int
    releases: int  # of the table, when this was built
    slots_column: bytes
    counts_column: bytes
    samples_column: bytes
    seq_ids_column: bytes
    tops: tuple[tuple[int, int], ...] = ()  # places of rows that want log-probabilities, and how many best ones


def _routes(seq_ids: NDArray[np.uint64]) -> tuple[NDArray[np.uint8] | None, int]:
    """A roster's `tokenizers` and `tokenizer`, as `tokenizer_of` tells each."""
    tokenizers = (seq_ids >> np.uint64(48)).astype(np.uint8)
    kinds = tokenizers.tobytes()
    if not kinds:
        return None, 0
    return tokenizers if kinds.count(kinds[0]) != len(kinds) else None, kinds[0]


def readdressed(roster: Roster, row: Row) -> Roster:
    """The same roster with the row's present seq_id."""
    places = np.flatnonzero((roster.slots == row.slot) & (roster.epochs == row.epoch))
    if not len(places):
        return roster
    seq_ids = roster.seq_ids.copy()
    seq_ids[places] = row.sequence.seq_id
    tokenizers, tokenizer = _routes(seq_ids)
    return msgspec.structs.replace(
        roster, seq_ids=seq_ids, tokenizers=tokenizers, tokenizer=tokenizer, seq_ids_column=seq_ids.tobytes()
    )


class History:
    """The last `depth` results of every slot."""

    def __init__(self, max_rows: int, depth: int) -> None:
        by_slot = np.zeros((max_rows, depth), np.uint32)
        self.depth = depth
        self._by_tick = by_slot.T
        self._bytes = by_slot.data.cast("B")

    def put(self, tick: int, slots: I64, tokens: U32) -> None:
        """One result for each of these slots."""
        self._by_tick[tick % self.depth][slots] = tokens

    def append_to(self, tokens: bytearray, slot: int, tick: int, count: int) -> None:
        """Appends a slot's results of `count` ticks from `tick` on to `tokens`, as _i32."""
        begin = slot * self.depth
        start = begin + tick % self.depth
        over = start + count - begin - self.depth
        if over <= 0:
            tokens += self._bytes[start * 4 : (start + count) * 4]
        else:
            tokens += self._bytes[start * 4 : (begin + self.depth) * 4]
            tokens += self._bytes[begin * 4 : (begin + over) * 4]


class RowTable:
    """All rows by slot; the history reaches `block_tokens + plans_in_flight` ticks back."""

    def __init__(self, max_rows: int, block_tokens: int, plans_in_flight: int) -> None:
        self.tick = 0  # decode plans made
        self.received_tick = 0  # decode results applied
        self.by_slot: list[Row | None] = [None] * max_rows
        self._stepping = np.zeros(max_rows, np.bool_)
        self._epochs = np.full(max_rows, -1, np.int64)
        self._position_base = np.zeros(max_rows, np.int64)
        self._index_base = np.zeros(max_rows, np.int64)
        self._seq_ids = np.zeros(max_rows, np.uint64)
        self._tops = np.full(max_rows, -1, np.int64)
        self._history = History(max_rows, block_tokens + plans_in_flight + 1)
        self._phases: list[dict[int, Row]] = [{} for _ in range(block_tokens)]
        self._ends: dict[int, list[Row]] = {}
        self._releases = 0
        self._opened = 0
        self._roster: Roster | None = None

    def holds(self, row: Row) -> bool:
        """Whether the row is one of these; it may be another worker's."""
        return row.slot < len(self.by_slot) and self.by_slot[row.slot] is row

    def open(self, row: Row) -> None:
        """A sequence takes the row's slot."""
        slot = row.slot
        assert self.by_slot[slot] is None, f"slot {slot} is taken"
        self._opened += 1
        row.epoch = self._opened
        self.by_slot[slot] = row
        self._epochs[slot] = row.epoch
        self._tops[slot] = row.sequence.sampling.report.top
        self.readdress(row)

    def readdress(self, row: Row) -> None:
        """The row's sequence has got its seq_id."""
        self._seq_ids[row.slot] = row.sequence.seq_id
        if self._stepping[row.slot]:
            self._roster = None

    def close(self, row: Row) -> None:
        """The row is gone; results on their way for it will be dropped."""
        row.alive = False
        self.by_slot[row.slot] = None
        self._epochs[row.slot] = -1
        self._releases += 1
        if self._stepping[row.slot]:
            self._leave(row)

    def join(self, row: Row) -> None:
        """From the next tick on the row computes one token per tick, starting at position `row.scheduled`."""
        sequence, slot = row.sequence, row.slot
        row.flushed_tick = self.tick
        base = row.position_base = row.scheduled - self.tick - 1
        row.last_tick = sequence.limit - 2 - base
        self._position_base[slot] = base
        self._index_base[slot] = base + 1 - sequence.request.num_prompt
        self._stepping[slot] = True
        self._phases[-base % len(self._phases)][slot] = row
        self._ends.setdefault(row.last_tick, []).append(row)
        sequence.tenant.step(self.tick, 1)
        self._roster = None

    def part(self, row: Row) -> None:
        """A STEPPING row goes on otherwise; no plan in flight names it."""
        self.flush(row)
        self._leave(row)
        row.flushed_tick = NEVER

    def _leave(self, row: Row) -> None:
        row.scheduled = row.position_base + self.tick + 1
        self._stepping[row.slot] = False
        del self._phases[-row.position_base % len(self._phases)][row.slot]
        ends = self._ends[row.last_tick]
        ends.remove(row)
        if not ends:
            del self._ends[row.last_tick]
        row.sequence.tenant.step(self.tick, -1)
        self._roster = None

    def roster(self) -> Roster:
        """The STEPPING rows now."""
        if self._roster is None:
            self._roster = self._build_roster()
        return self._roster

    def _build_roster(self) -> Roster:
        slots = np.flatnonzero(self._stepping)
        size, tick = len(slots), self.tick
        seq_ids, tops = self._seq_ids[slots], self._tops[slots]
        tokenizers, tokenizer = _routes(seq_ids)
        reporting = np.flatnonzero(tops >= 0)
        return Roster(
            size=size,
            slots=slots,
            epochs=self._epochs[slots],
            tick=tick,
            positions=(self._position_base[slots] + tick).astype(np.int32),
            indices=(self._index_base[slots] + tick).astype(np.int32),
            seq_ids=seq_ids,
            tokenizers=tokenizers,
            tokenizer=tokenizer,
            releases=self._releases,
            slots_column=slots.astype(np.int32).tobytes(),
            counts_column=b"\x01\x00\x00\x00" * size,
            samples_column=b"\x01" * size,
            seq_ids_column=seq_ids.tobytes(),
            tops=tuple(zip(reporting.tolist(), tops[reporting].tolist(), strict=True)),
        )

    def entering_block(self) -> list[Row]:
        """Rows whose next position is the first of a block."""
        return list(self._phases[(self.tick + 1) % len(self._phases)].values())

    def advance(self) -> list[Row]:
        """One decode plan: all STEPPING rows compute one token. Returns the rows whose last token this is; they have
        left the table, but the roster taken before still names them."""
        self.tick += 1
        ending = self._ends.get(self.tick)
        if ending is None:
            return []
        rows = list(ending)
        for row in rows:
            self._leave(row)
        return rows

    def living(self, roster: Roster) -> I64 | None:
        """Places in the roster whose rows still live; None is all of them."""
        if roster.releases == self._releases:
            return None
        return np.flatnonzero(self._epochs[roster.slots] == roster.epochs)

    def receive(self, roster: Roster, tokens: U32, living: I64 | None, tick: int) -> None:
        """Keeps one decode step's results: tokens[j] is for row j of the roster."""
        self.received_tick = tick
        if living is None:
            self._history.put(tick, roster.slots, tokens)
        else:
            self._history.put(tick, roster.slots[living], tokens[living])

    def flush_filled_blocks(self, tick: int) -> list[Row]:
        """Flushes the STEPPING rows for which the result of `tick`, the last received, is the first token of a block.

        Returns them: their block before is full, and all its positions have been computed.
        """
        append_to = self._history.append_to
        filled = []
        for row in self._phases[(tick + 1) % len(self._phases)].values():
            flushed_tick = row.flushed_tick
            if flushed_tick < tick:
                append_to(row.sequence.tokens, row.slot, flushed_tick + 1, tick - flushed_tick)
                row.flushed_tick = tick
                filled.append(row)
        return filled

    def flush(self, row: Row) -> None:
        """Moves received results into the sequence's tokens. For rows that never stepped it does nothing."""
        until = min(self.received_tick, row.last_tick)
        count = until - row.flushed_tick
        if count <= 0:
            return
        self._history.append_to(row.sequence.tokens, row.slot, row.flushed_tick + 1, count)
        row.flushed_tick = until

    def scheduled(self, row: Row) -> int:
        """Positions of this row that issued plans compute."""
        return row.position_base + self.tick + 1 if self._stepping[row.slot] else row.scheduled

    def check(self, living: set[Row], stepping: set[Row]) -> None:
        """Asserts that exactly these rows live and step, and that every derived place agrees."""
        assert {row for row in self.by_slot if row is not None} == living, "rows by slot differ from the living ones"
        for slot, row in enumerate(self.by_slot):
            assert self._epochs[slot] == (-1 if row is None else row.epoch), f"epoch of slot {slot} is wrong"
            assert row is None or (row.slot == slot and row.alive), f"row of slot {slot} is misplaced"
        assert {self.by_slot[slot] for slot in np.flatnonzero(self._stepping)} == stepping, "stepping mask is wrong"
        assert {row for rows in self._ends.values() for row in rows} == stepping, "length ends are incomplete"
        assert all(self._ends.values()), "an empty tick is kept"
        assert sum(len(rows) for rows in self._phases) == len(stepping), "phases are incomplete"
        for phase, rows in enumerate(self._phases):
            for slot, row in rows.items():
                assert row in stepping and row.slot == slot, "a phase holds another row"
                assert (row.position_base + phase) % len(self._phases) == 0, "a row is in the wrong phase"
        for tick, ends in self._ends.items():
            assert all(row.last_tick == tick > self.tick for row in ends), "a length end has been passed"
        if self._roster is not None:
            assert self._roster.slots.tolist() == np.flatnonzero(self._stepping).tolist(), "the roster is stale"
            assert self._roster.epochs.tolist() == self._epochs[self._roster.slots].tolist(), "the roster is stale"
