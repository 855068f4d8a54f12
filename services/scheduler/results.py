"""Applies a step's result: which tokens are new, who ends by them, what tokenizers must hear.

Called by the core with the oldest plan in flight. Results of rows that have gone meanwhile are dropped.
"""

from collections.abc import Iterable
from math import inf

import numpy as np
from numpy.typing import NDArray

from common.errors import RejectReason
from common.protocol import FinishReason, RowFault, StepResult
from services.scheduler import drafting, reports, vectors
from services.scheduler.request import NEVER, Row
from services.scheduler.rows import I64, U32, Roster
from services.scheduler.state import Fault, Flight, State, Worker


def apply_result(state: State, result: StepResult) -> None:
    """Takes the oldest plan out of flight. Raises Fault, having changed nothing, if the result does not fit it."""
    worker = state.worker
    assert worker is not None
    flight = state.in_flight[0]
    if result.step != flight.step:
        raise Fault(f"result of step {result.step} came before that of step {flight.step}")
    if result.error:
        _land(state, worker)
        state.counters["failed_steps"] += 1
        fail_step(state, worker, flight, result.error)
        return
    num_stepped = flight.num_stepped
    num_samples = num_stepped + len(flight.samplers)
    drafted = drafting.read_counts(flight, result, num_samples)
    num_tokens = num_samples if drafted is None else drafted.num_tokens
    if len(result.tokens) != 4 * num_tokens:
        raise Fault(f"step {flight.step} gave {len(result.tokens)} bytes of tokens for {num_samples} rows")
    tokens = np.frombuffer(result.tokens, np.uint32)
    try:
        flags = worker.stops.flags(tokens)
    except IndexError:
        outside = [token for token in tokens.view(np.int32).tolist() if not 0 <= token < worker.facts.vocab_size]
        raise Fault(f"step {flight.step} gave token {outside[0]}, outside the vocabulary") from None
    failed = _failed_places(flight, result.failed)
    if not all(0 <= fault.place < num_stepped + len(flight.filled) for fault in result.faults):
        raise Fault(f"step {flight.step} names faulty rows that its plan does not have")
    told = reports.read(worker, flight, result, drafted, () if failed is None else set(failed.tolist()))
    found = vectors.read(worker, flight, result, failed)
    elapsed_s = _land(state, worker)
    if worker.drafts.tokens and not flight.filled:
        worker.drafts.switch.note(bool(flight.drafted), flight.num_stepped, elapsed_s, num_tokens)
    if failed is not None:
        _fail_rows(state, worker, flight, failed)
    if result.faults:
        _end_faulty(state, worker, flight, result.faults)
    reports.apply(state, told)
    state.counters["output_tokens"] += len(tokens)
    if flight.roster is not None:
        stepped = tokens[:num_stepped] if flight.samplers else tokens
        _apply_stepped(state, worker, flight, flight.roster, stepped, flags)
    if drafted is not None:
        drafting.apply(state, worker, flight, drafted, tokens, flags)
    for place, row in enumerate(flight.samplers, num_tokens - len(flight.samplers)):
        if row.alive:
            _apply_first(state, worker, row, int(tokens[place]))
    vectors.apply(state, found)


def _land(state: State, worker: Worker) -> float:
    flight = state.in_flight.popleft()
    return worker.pace.finished(flight.sent_s, flight.num_stepped, flight.num_filled, state.now_s)


def _failed_places(flight: Flight, column: bytes) -> I64 | None:
    """Raises Fault for places that the plan does not have."""
    if not column:
        return None
    num_rows = flight.num_stepped + len(flight.filled)
    if len(column) % 4 == 0:
        places = np.frombuffer(column, np.int32).astype(np.int64)
        if ((places >= 0) & (places < num_rows)).all():
            return places
    raise Fault(f"step {flight.step} names failed rows that its plan of {num_rows} rows does not have")


def _fail_rows(state: State, worker: Worker, flight: Flight, places: I64) -> None:
    """The device had no memory for these rows, however small the pieces were in which it ran them."""
    rows = _rows_at(worker, flight, places)
    state.counters["out_of_memory"] += sum(row.alive for row in rows)
    message = "the device had no memory left for this request"
    fail_rows(state, worker, flight, rows, (message, RejectReason.OUT_OF_MEMORY))


def _rows_at(worker: Worker, flight: Flight, places: I64) -> list[Row]:
    """The living rows at these places of a plan."""
    rows = [flight.filled[place - flight.num_stepped] for place in places.tolist() if place >= flight.num_stepped]
    return rows + stepped_rows(worker, flight, places[places < flight.num_stepped])


def _end_faulty(state: State, worker: Worker, flight: Flight, faults: Iterable[RowFault]) -> None:
    """Rows whose grammar cannot go on end; those whose grammar is being prepared start again. Their KV is right."""
    for fault in faults:
        for row in _rows_at(worker, flight, np.array([fault.place], np.int64)):
            if row.alive and fault.message:
                state.finish(row.sequence, FinishReason.ERROR, message=fault.message, code=RejectReason.INVALID)
            elif row.alive:
                state.preempt(row, "its grammar is being prepared")


def fail_step(state: State, worker: Worker, flight: Flight, error: str) -> None:
    """The step computed nothing: all its rows fail."""
    stepped = stepped_rows(worker, flight, np.arange(flight.num_stepped))
    fail_rows(state, worker, flight, [*stepped, *flight.filled], (error, ""))


def fail_rows(state: State, worker: Worker, flight: Flight, rows: Iterable[Row], error: tuple[str, str]) -> None:
    """These rows of the step computed nothing. They end; what later plans may have built upon them starts over.

    To be called before the step's tokens are received: rows that have ended take none. `error`: message and code.
    """
    message, code = error
    for row in rows:
        if row.alive:
            state.finish(row.sequence, FinishReason.ERROR, message=message, code=code)
    for later in state.in_flight:
        for row in later.added:
            if row.alive:
                # It may have found blocks of a failed row, or copied one; its own KV would be built on them.
                row.published = NEVER
                state.preempt(row, "an earlier step failed")
    for unsure in (flight, *state.in_flight):
        worker.kv.withdraw(unsure.published)


def stepped_rows(worker: Worker, flight: Flight, places: I64) -> list[Row]:
    """The living rows at these places of a step, before those that it fills."""
    roster = flight.roster
    if roster is None:
        return [flight.drafted[place][0] for place in places.tolist()]
    by_slot = zip(roster.slots[places].tolist(), roster.epochs[places].tolist(), strict=True)
    found = [(worker.rows.by_slot[slot], epoch) for slot, epoch in by_slot]
    return [row for row, epoch in found if row is not None and row.epoch == epoch]


def _apply_first(state: State, worker: Worker, row: Row, token: int) -> None:
    """The token after a row's known ones."""
    sequence = row.sequence
    index = sequence.num_output
    sequence.tokens += token.to_bytes(4, "little")
    if sequence.first_s == inf:
        sequence.first_s = state.now_s
        state.outbox.add_cached(sequence.seq_id, sequence.cached_tokens)
    state.outbox.add_row(sequence.seq_id, index, token)
    reason = worker.stops.reason(sequence.sampling, token, index)
    if reason is not None:
        state.finish(sequence, reason, token)
    elif sequence.known == sequence.limit:
        state.finish(sequence, FinishReason.LENGTH)


def _apply_stepped(state: State, worker: Worker, flight: Flight, roster: Roster, tokens: U32, flags: bytes) -> None:
    rows, tick = worker.rows, flight.tick
    living = rows.living(roster)
    rows.receive(roster, tokens, living, tick)
    indices = roster.indices + (tick - roster.tick)
    _post(state, roster, indices, tokens, living)
    place = flags.find(1, 0, roster.size)
    while place >= 0:
        row = rows.by_slot[roster.slots[place]]
        if row is not None and row.epoch == roster.epochs[place]:
            token = int(tokens[place])
            reason = worker.stops.reason(row.sequence.sampling, token, int(indices[place]))
            if reason is not None:
                state.finish(row.sequence, reason, token)
        place = flags.find(1, place + 1, roster.size)
    for row in flight.ending:
        if row.alive:
            state.finish(row.sequence, FinishReason.LENGTH)
    state.settle_filled_blocks(tick)


def _post(state: State, roster: Roster, indices: NDArray[np.int32], tokens: U32, living: I64 | None) -> None:
    """Hands the tokens of living rows to their tokenizers."""
    outbox = state.outbox
    if living is None and roster.tokenizers is None:
        outbox.add_rows(roster.tokenizer, roster.seq_ids_column, indices.tobytes(), tokens.tobytes())
        return
    kinds = [roster.tokenizer] if roster.tokenizers is None else np.unique(roster.tokenizers).tolist()
    for tokenizer in kinds:
        places = living
        if roster.tokenizers is not None:
            own = roster.tokenizers == tokenizer
            places = np.flatnonzero(own) if living is None else living[own[living]]
        assert places is not None
        if len(places):
            seq_ids = roster.seq_ids[places].tobytes()
            outbox.add_rows(tokenizer, seq_ids, indices[places].tobytes(), tokens[places].tobytes())
