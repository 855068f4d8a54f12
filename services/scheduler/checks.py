"""Recomputes every invariant of the core's state from scratch. For tests and the simulator; O(everything)."""

from common.kv_needs import first_block, window_blocks
from services.scheduler.policy import MOST_DRAFTS
from services.scheduler.request import NEVER, Row, Sequence, Stage
from services.scheduler.state import State, Worker, by_key
from services.scheduler.tenants import Tenant

MOST_PLANS = 8  # in flight


def check(state: State) -> None:
    """Raises AssertionError, with the story where one sequence is at fault."""
    state.waiting.check(sequence for sequence in state.sequences.values() if sequence.stage is Stage.WAITING)
    _check_tenants(state)
    assert len(state.in_flight) <= state.limits.plans_in_flight, "too many plans in flight"
    steps = [flight.step for flight in state.in_flight]
    assert steps == sorted(set(steps)), "plans in flight are out of order"
    assert not steps or steps[-1] == state.step, "the newest plan in flight is not the last made"
    rows = [sequence.row for sequence in state.sequences.values() if sequence.row is not None]
    for sequence in state.sequences.values():
        _check_sequence(sequence)
        origin, seq_id = sequence.origin, sequence.seq_id
        assert state.past.names.get(origin, origin) == seq_id, f"not found by its origin {origin:#x}"
    filling = [row for row in rows if row.sequence.stage is Stage.FILLING]
    assert state.filling == sorted(filling, key=by_key), "the list of filling rows is wrong"
    if state.worker is None:
        assert not rows and not state.ready, "rows without any worker"
        return
    assert state.ready or not (rows or state.in_flight), "rows without a worker"
    _check_worker(state, state.worker, rows)


def told(sequence: Sequence) -> str:
    return "\n".join(sequence.story())


def _check_tenants(state: State) -> None:
    by_tenant: dict[Tenant, list[Sequence]] = {}
    for sequence in state.sequences.values():
        by_tenant.setdefault(sequence.tenant, []).append(sequence)
    assert len(by_tenant) == len(state.waiting.tenants), "a tenant without sequences is kept, or one is missing"
    for tenant, sequences in by_tenant.items():
        waiting = [sequence.key for sequence in sequences if sequence.stage is Stage.WAITING]
        stepping = sum(sequence.stage is Stage.STEPPING for sequence in sequences)
        tenant.check(waiting, stepping, len(sequences))


def _check_sequence(sequence: Sequence) -> None:
    row = sequence.row
    assert sequence.stage is not Stage.FINISHED, f"finished but kept\n{told(sequence)}"
    assert (row is None) == (sequence.stage in (Stage.WAITING, Stage.PAUSED)), (
        f"row and stage disagree\n{told(sequence)}"
    )
    assert row is None or (row.alive and row.sequence is sequence), f"the row is not its own\n{told(sequence)}"
    assert sequence in sequence.request.choices, f"its request has forgotten it\n{told(sequence)}"
    assert sequence.request.num_prompt <= sequence.known < sequence.limit, (
        f"known tokens out of range\n{told(sequence)}"
    )
    assert bytes(sequence.tokens[: len(sequence.request.prompt)]) == sequence.request.prompt, (
        f"prompt changed\n{told(sequence)}"
    )


def _check_worker(state: State, worker: Worker, rows: list[Row]) -> None:
    worker.kv.check(rows)
    worker.slots.check({row.slot for row in rows})
    stepping = {row for row in rows if row.sequence.stage is Stage.STEPPING}
    worker.rows.check(set(rows), stepping)
    drafting = {row for row in rows if row.sequence.stage is Stage.DRAFTING}
    assert set(worker.drafts.rows.values()) == drafting, "the list of drafting rows is wrong"
    assert worker.drafts.on or not drafting, "rows draft though drafts are off"
    assert worker.rows.received_tick <= worker.rows.tick, "a tick was received before it was planned"
    expected = {row for flight in state.in_flight for row in (*flight.samplers, *flight.pooled, *flight.ending)}
    for row in rows:
        _check_row(worker, row, row in expected)
        if row in drafting:
            _check_drafting(state, row)


def _check_drafting(state: State, row: Row) -> None:
    """Its positions are reserved as if all drafts in flight held."""
    ahead = sum(count for flight in state.in_flight for drafted, count in flight.drafted if drafted is row)
    ahead += sum(row in flight.samplers for flight in state.in_flight)
    known = row.sequence.known
    assert row.scheduled == known - 1 + ahead, (
        f"{row.scheduled} scheduled with {known} known and {ahead} ahead\n{told(row.sequence)}"
    )
    assert ahead or row.scheduled < row.sequence.limit - 1, f"nothing is left to plan\n{told(row.sequence)}"


def _check_row(worker: Worker, row: Row, result_expected: bool) -> None:
    sequence, block_tokens = row.sequence, worker.kv.block_tokens
    scheduled = worker.rows.scheduled(row)
    reserved = max(sequence.known, scheduled) if sequence.stage is Stage.FILLING else scheduled
    _check_tables(worker, row, reserved, scheduled)
    assert scheduled < sequence.limit, f"scheduled up to {scheduled} of {sequence.limit}\n{told(sequence)}"
    assert sequence.stage is not Stage.FILLING or scheduled < sequence.known, f"filling though full\n{told(sequence)}"
    assert (row.filled_step == NEVER) == (sequence.stage is Stage.FILLING), f"filled_step is wrong\n{told(sequence)}"
    assert sequence.stage is not Stage.ENDING or scheduled == sequence.limit - 1, f"ends too early\n{told(sequence)}"
    assert row.published <= scheduled // block_tokens, f"published before it was scheduled\n{told(sequence)}"
    assert len(sequence.chain) <= sequence.limit // block_tokens, (
        f"digests of blocks that cannot exist\n{told(sequence)}"
    )
    assert sequence.stage is not Stage.ENDING or result_expected, (
        f"waits for a result that never comes\n{told(sequence)}"
    )


def _check_tables(worker: Worker, row: Row, reserved: int, scheduled: int) -> None:
    """Blocks of a full group for all `reserved` tokens, of a window for what the next token reads."""
    block_tokens, story = worker.kv.block_tokens, told(row.sequence)
    # What was reserved for drafts that did not hold stays the row's.
    surplus = -(-MOST_DRAFTS * MOST_PLANS // block_tokens) if worker.drafts.tokens else 0
    assert row.blocks is row.tables[0].blocks, f"the first table is not the first group's\n{story}"
    for group, table in zip(worker.kv.groups, row.tables, strict=True):
        assert len(set(table.blocks)) == len(table.blocks), f"a block is twice in the table\n{story}"
        if group.kind == "state":
            assert (table.first, len(table.blocks)) == (0, 1), f"{len(table.blocks)} live blocks\n{story}"
            continue
        tokens = reserved if group.kind == "full" else scheduled
        more = table.end - -(-tokens // block_tokens)
        assert 0 <= more <= surplus, f"blocks up to {table.end} for {tokens} tokens\n{story}"
        least = min(scheduled, row.sequence.known - 1) if row.sequence.stage is Stage.DRAFTING else scheduled
        needed = first_block(group, least, block_tokens)
        assert table.first <= needed, f"blocks before {table.first} are gone, {needed} is needed\n{story}"
        if group.kind == "window":
            most = window_blocks(group.window, worker.kv.chunk, block_tokens)
            assert len(table.blocks) <= most + 2 * surplus, (
                f"{len(table.blocks)} blocks of a window, not {most}\n{story}"
            )
