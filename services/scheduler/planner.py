"""Makes the next step's plan. Called by the core whenever the worker can take one more.

Rows that step come first (or last, by policy), chunks of known tokens fill the rest of the token budget, and waiting
sequences are admitted in order: a head that does not fit is not overtaken, except by others while it waits for a
sibling to compute their common prompt. Invariant: what a plan reads was written by plans issued before it.
"""

from dataclasses import dataclass, field

from common.columns import pack_i32
from common.protocol import RowStart, StepPlan
from services.scheduler import policy
from services.scheduler.request import Row, Sequence, Stage
from services.scheduler.state import Flight, State, Worker, by_key


@dataclass(slots=True, eq=False)
class Draft:
    """A plan under construction; columns of the rows that fill follow those of the rows that step."""

    flight: Flight
    budget: int
    added: list[RowStart] = field(default_factory=list)
    grown_slots: list[int] = field(default_factory=list)
    grown_blocks: list[int] = field(default_factory=list)
    copy_source: list[int] = field(default_factory=list)
    copy_target: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


def make_plan(state: State) -> StepPlan | None:
    """The next plan, already counted as issued; None if there is nothing to compute."""
    worker = state.worker
    assert worker is not None and state.ready
    draft = Draft(Flight(state.step + 1), state.limits.step_tokens)
    if state.limits.policy == "decode_first":
        preempted = _step_rows(state, worker, draft)
        # Admission after a preemption would hand the blocks straight back.
        _fill_rows(state, worker, draft, admit=not preempted or draft.flight.roster is None)
    else:
        _fill_rows(state, worker, draft, admit=True)
        if not draft.slots:
            _step_rows(state, worker, draft)
    flight = draft.flight
    if flight.roster is None and not draft.slots:
        return None
    flight.num_tokens = state.limits.step_tokens - draft.budget
    if draft.slots:
        for row in (*flight.samplers, *flight.fillers):
            flight.published += state.publish(row, row.scheduled)
    state.step = flight.step
    state.in_flight.append(flight)
    return _pack(worker, draft)


def _pack(worker: Worker, draft: Draft) -> StepPlan:
    flight, roster = draft.flight, draft.flight.roster
    slots = positions = counts = samples = b""
    if roster is not None:
        slots, counts, samples = roster.slots_column, roster.counts_column, roster.samples_column
        positions = (roster.positions + (flight.tick - roster.tick)).tobytes()
    if draft.slots:
        slots += pack_i32(draft.slots)
        positions += pack_i32(draft.positions)
        counts += pack_i32(draft.counts)
        sampling = {row.slot for row in flight.samplers}
        samples += bytes(slot in sampling for slot in draft.slots)
    return StepPlan(
        flight.step,
        worker.slots.drain_removed(),
        draft.added,
        pack_i32(draft.grown_slots),
        pack_i32(draft.grown_blocks),
        pack_i32(draft.copy_source),
        pack_i32(draft.copy_target),
        slots,
        positions,
        counts,
        samples,
    )


def _step_rows(state: State, worker: Worker, draft: Draft) -> bool:
    """Gives every STEPPING row its token. Returns whether rows had to be preempted for it."""
    rows = worker.rows
    preempted = False
    entering = rows.entering_block()
    if entering:
        preempted = _grow(state, worker, draft, entering)
    roster = rows.roster()
    if roster.size == 0:
        return preempted
    flight = draft.flight
    flight.roster = roster
    flight.ending = rows.advance()
    flight.tick = rows.tick
    for row in flight.ending:
        row.sequence.move(Stage.ENDING, state.now_s, "all tokens scheduled")
    draft.budget -= roster.size
    return preempted


def _grow(state: State, worker: Worker, draft: Draft, entering: list[Row]) -> bool:
    """One more block for each row, the most urgent first where blocks are short."""
    pool = worker.pool
    short = not pool.can_allocate(len(entering))
    if short:
        entering.sort(key=by_key)
        entering = [row for row in entering if row.alive and _make_room(state, worker, row, draft)]
    else:
        for row, block in zip(entering, pool.allocate(len(entering)), strict=True):
            row.blocks.append(block)
    draft.grown_slots = [row.slot for row in entering]
    draft.grown_blocks = [row.blocks[-1] for row in entering]
    return short


def _make_room(state: State, worker: Worker, row: Row, draft: Draft) -> bool:
    """Takes a block for `row`, from the newest and least urgent rows if none is free. False: that was `row` itself."""
    while not worker.pool.can_allocate(1):
        others = {by_key(other): other for other in worker.rows.by_slot if other is not None and _may_yield(other)}
        chosen = others[policy.victim(by_key(row), others)]
        state.preempt(chosen, f"preempted in step {draft.flight.step} for {row.sequence.seq_id:#x}")
        if chosen is row:
            return False
    row.blocks += worker.pool.allocate(1)
    return True


def _may_yield(row: Row) -> bool:
    """A row that only waits for its last results gives its blocks back soon anyway."""
    return row.sequence.stage is not Stage.ENDING


def _fill_rows(state: State, worker: Worker, draft: Draft, admit: bool) -> None:
    """Spends what is left of the budget on known tokens: of rows first, then of waiting sequences."""
    if not state.filling and not (admit and state.waiting):
        return
    for row in state.filling:
        if draft.budget == 0:
            break
        _give_chunk(state, worker, draft, row)
    idx = 0
    while admit and draft.budget and idx < len(state.waiting) and worker.slots.free:
        sequence = state.waiting.at(idx)
        donor, held = _donor(sequence, draft.flight.step)
        if held:
            idx += 1
            continue
        row_or_none = _admit(state, worker, draft, sequence, donor)
        if row_or_none is None:
            break
        state.waiting.pop(idx)
        _give_chunk(state, worker, draft, row_or_none)
    state.filling = [row for row in state.filling if row.sequence.stage is Stage.FILLING]


def _give_chunk(state: State, worker: Worker, draft: Draft, row: Row) -> None:
    sequence, flight = row.sequence, draft.flight
    known = sequence.known
    count = policy.chunk(known - row.scheduled, draft.budget, state.limits.chunk_tokens)
    draft.slots.append(row.slot)
    draft.positions.append(row.scheduled)
    draft.counts.append(count)
    draft.budget -= count
    row.scheduled += count
    if row.scheduled < known:
        flight.fillers.append(row)
        return
    flight.samplers.append(row)
    row.filled_step = flight.step
    if known + 1 == sequence.limit:
        sequence.move(Stage.ENDING, state.now_s, f"all tokens scheduled in step {flight.step}")
    else:
        sequence.move(Stage.STEPPING, state.now_s, f"filled in step {flight.step}")
        worker.rows.join(row)


def _donor(sequence: Sequence, step: int) -> tuple[Row | None, bool]:
    """A sibling's row that holds the whole prompt, and whether to wait for one that is about to."""
    held = False
    if len(sequence.request.choices) > 1 and not sequence.num_output:
        for other in sequence.request.choices:
            row = other.row
            if row is not None:
                if row.filled_step < step:
                    return row, False
                held = True
    return None, held


def _admit(state: State, worker: Worker, draft: Draft, sequence: Sequence, donor: Row | None) -> Row | None:
    """Gives a waiting sequence blocks for all its known tokens and a row; None if there is no space now."""
    pool, known = worker.pool, sequence.known
    # At least the last token is computed, since its logits are needed.
    reusable = (known - 1) // pool.block_tokens
    if donor is not None:
        shared = donor.blocks[:reusable]
    elif state.prefix_cache:
        shared = pool.match(sequence.tokens, reusable, sequence.request.root, sequence.chain)
    else:
        shared = []
    needed = -(-known // pool.block_tokens) - len(shared)
    running = worker.slots.max_rows - worker.slots.free
    if not policy.may_admit(needed, pool.free_after_share(shared), pool.num_blocks, running):
        return None
    pool.share(shared)
    blocks = shared + pool.allocate(needed)
    computed = len(shared) * pool.block_tokens
    if sequence.cached_tokens < 0:
        found = computed if donor is None else donor.sequence.cached_tokens
        sequence.cached_tokens = min(found, sequence.request.num_prompt)
        state.counters["cached_tokens"] += sequence.cached_tokens
    if donor is not None:
        if (known - 1) % pool.block_tokens:
            draft.copy_source.append(donor.blocks[reusable])
            draft.copy_target.append(blocks[reusable])
        computed = known - 1
        sequence.chain = donor.sequence.chain[:reusable]
    why = f"row in step {draft.flight.step}, {computed} of {known} tokens have KV"
    row = state.start_row(sequence, blocks, computed, why)
    draft.flight.added.append(row)
    draft.added.append(
        RowStart(
            slot=row.slot,
            seq_id=sequence.seq_id,
            tokens=bytes(sequence.tokens),
            num_prompt=sequence.request.num_prompt,
            computed=computed,
            blocks=pack_i32(blocks),
            sampling=sequence.sampling,
        )
    )
    return row
