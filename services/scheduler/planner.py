"""Makes the next step's plan. Called by the core whenever the worker can take one more.

Rows that step come first (or last, by policy), chunks of known tokens fill the rest of the token budget, and waiting
sequences are admitted in order: a head that does not fit is not overtaken, except by others while it waits for a
sibling to compute their common prompt. Invariant: what a plan reads was written by plans issued before it.
"""

import math
from dataclasses import dataclass, field
from functools import partial

from common.columns import pack_i32
from common.protocol import RowStart, RowTable, StepPlan
from common.trace_context import within
from services.scheduler import drafting, policy, reports
from services.scheduler.request import Row, Sequence, Stage
from services.scheduler.state import Flight, State, Worker

# Blocks given to rows that step: the plan's columns `grown_slots` and `grown_blocks`, and whether rows were preempted.
Growth = tuple[bytes, bytes, bool]
NO_GROWTH: Growth = (b"", b"", False)


@dataclass(slots=True, eq=False)
class Fill:
    """What rows that fill add to a plan; their columns follow those of the rows that step."""

    step: int
    budget: int  # tokens left
    cost: float  # and what they may cost, as policy.chunk_cost counts
    added: list[RowStart] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: bytearray = field(default_factory=bytearray)
    rows: list[Row] = field(default_factory=list)  # in the order of the columns
    rows_added: list[Row] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return self.budget == 0 or self.cost < 1


def make_plan(state: State) -> StepPlan | None:
    """The next plan, already counted as issued; None if there is nothing to compute."""
    worker = state.worker
    assert worker is not None and state.ready
    if drafting.must_wait(state, worker):
        return None
    decode_first = state.limits.policy == "decode_first"
    flight = Flight(state.step + 1, sent_s=state.now_s)
    growth, fill = NO_GROWTH, None
    if not decode_first:
        fill = _fill_rows(state, worker, flight, admit=True)
    if fill is None:
        growth = _step_rows(state, worker, flight)
    if decode_first and (state.filling or state.waiting):
        # Admission after a preemption would hand the blocks straight back.
        fill = _fill_rows(state, worker, flight, admit=not growth[2] or not flight.num_stepped)
    if fill is not None:
        _issue(state, flight, fill)
    elif not flight.num_stepped:
        return None
    state.step = flight.step
    state.past.figures.step_tokens.add(flight.num_tokens)
    state.in_flight.append(flight)
    return _pack(worker, flight, growth, fill)


def _issue(state: State, flight: Flight, fill: Fill) -> None:
    """What the plan will have computed may be found by all later plans."""
    flight.num_tokens += sum(fill.counts)
    flight.added, flight.filled = fill.rows_added, fill.rows
    flight.samplers = [row for row, samples in zip(fill.rows, fill.samples, strict=True) if samples]
    flight.pooled = [row for row in fill.rows if row.sequence.pooled and row.filled_step == fill.step]
    others = [row for row, samples in zip(fill.rows, fill.samples, strict=True) if not samples]
    flight.fillers = [row for row in others if row not in flight.pooled] if flight.pooled else others
    flight.published = [block for row in fill.rows for block in state.publish(row, row.scheduled)]


def _pack(worker: Worker, flight: Flight, growth: Growth, fill: Fill | None) -> StepPlan:
    removed, roster = worker.slots.drain_removed(), flight.roster
    grown_slots, grown_blocks, _ = growth
    slots = positions = counts = samples = b""
    if roster is not None:
        slots, counts, samples = roster.slots_column, roster.counts_column, roster.samples_column
        positions = (roster.positions + (flight.tick - roster.tick)).tobytes()
    elif flight.drafted:
        slots, positions, counts, samples = drafting.columns(flight)
    num_drafting = len(flight.drafted)
    added: list[RowStart] = []
    if fill is not None:
        added = fill.added
        slots, positions = slots + pack_i32(fill.slots), positions + pack_i32(fill.positions)
        counts, samples = counts + pack_i32(fill.counts), samples + fill.samples
    of_rows = slots, positions, counts, samples
    if not worker.kv.changes.any:
        return StepPlan(
            flight.step, removed, added, grown_slots, grown_blocks, b"", b"", *of_rows, drafting=num_drafting
        )
    columns = worker.kv.drain()
    flight.published = [*flight.published, *columns.saved]
    return StepPlan(
        flight.step,
        removed,
        added,
        grown_slots + columns.grown_slots,
        grown_blocks + columns.grown_blocks,
        columns.copy_source,
        columns.copy_target,
        *of_rows,
        columns.grown,
        columns.copies,
        num_drafting,
    )


def _step_rows(state: State, worker: Worker, flight: Flight) -> Growth:
    """Gives every STEPPING row its token, and a block where that token is the first of one."""
    rows = worker.rows
    if worker.drafts.rows:
        alone = not state.filling and not (state.waiting and worker.slots.free)
        return drafting.plan_rows(state, worker, flight, alone, partial(_make_room, state, worker))
    entering = rows.entering_block()
    growth = _grow(state, worker, entering) if entering else NO_GROWTH
    roster = rows.roster()
    if roster.size:
        flight.roster = roster
        flight.num_stepped = flight.num_tokens = roster.size
        flight.ending = rows.advance()
        flight.tick = rows.tick
        for row in flight.ending:
            row.sequence.move(Stage.ENDING, state.now_s, "all tokens scheduled")
    return growth


def _grow(state: State, worker: Worker, entering: list[Row]) -> Growth:
    """One more block for each row, the most urgent first where blocks are short."""
    kv, plain, position = worker.kv, worker.kv.plain, worker.rows.tick + 1
    if not plain:
        for row in entering:
            kv.slide(row, row.position_base + position)
    lacking = entering
    if worker.drafts.tokens:  # some have blocks for drafts that did not hold
        at = {row: row.position_base + position for row in entering}
        lacking = [row for row in entering if not drafting.has_block(row, at[row], kv.block_tokens)]
    short = not (worker.pool.can_allocate(len(lacking)) if plain else kv.can_grow(len(lacking)))
    if short:
        lacking = [row for row in sorted(lacking, key=state.rank) if row.alive and _make_room(state, worker, row)]
        blocks = [row.blocks[-1] for row in lacking]
    else:
        blocks = kv.grow(lacking) if lacking else []
    if kv.every and state.prefix_cache:
        for row in entering:
            if row.alive:
                kv.save(row, row.position_base + position)
    return pack_i32([row.slot for row in lacking]), pack_i32(blocks), short


def _make_room(state: State, worker: Worker, row: Row) -> bool:
    """Takes a block for `row`, from the newest and least urgent rows if none is free. False: that was `row` itself."""
    while not worker.kv.can_grow(1):
        others = {state.rank(other): other for other in worker.rows.by_slot if other is not None and _may_yield(other)}
        chosen = others[policy.victim(state.rank(row), others)]
        state.preempt(chosen, f"preempted after step {state.step} for {row.sequence.seq_id:#x}")
        if chosen is row:
            return False
    worker.kv.grow([row])
    return True


def _may_yield(row: Row) -> bool:
    """A row that only waits for its last results gives its blocks back soon anyway."""
    return row.sequence.stage is not Stage.ENDING


def _fill_rows(state: State, worker: Worker, flight: Flight, admit: bool) -> Fill | None:
    """Spends what is left of the budget on known tokens: of rows first, then of waiting sequences.

    None if there are none, or none that can run now.
    """
    admit = admit and worker.slots.free > 0 and len(state.waiting) > 0
    if not state.filling and not admit:
        return None
    limits, waiting, cost = state.limits, state.waiting, math.inf
    wanting = len(state.filling) + (min(len(waiting), worker.slots.free) if admit else 0)
    beside = policy.beside_tokens(limits.step_tokens, limits.chunk_beside, flight.num_stepped, wanting)
    if flight.num_stepped:
        cost = policy.step_cost(beside, limits.chunk_context, worker.facts.attention_parity)
    fill = Fill(flight.step, min(limits.step_tokens - flight.num_tokens, beside), cost)
    # The list is by key, which says nothing between tenants.
    filling = sorted(state.filling, key=state.rank) if len(waiting.tenants) > 1 else list(state.filling)
    for row in filling:
        if fill.full:
            break
        if row.alive and (worker.kv.plain or _make_window(state, worker, fill, row)):
            _give_chunk(state, worker, fill, row)
    admit = admit and all(row.alive for row in filling)
    while admit and not fill.full and worker.slots.free and (sequence := waiting.first()) is not None:
        donor, held = _donor(worker, sequence, flight.step)
        if held:
            waiting.hold(sequence)
            continue
        admitted = _admit(state, worker, fill, sequence, donor)
        if admitted is None:
            break
        _give_chunk(state, worker, fill, admitted)
    waiting.release()
    if not fill.slots:
        return None
    state.filling = [row for row in state.filling if row.sequence.stage is Stage.FILLING]
    return fill


def _make_window(state: State, worker: Worker, fill: Fill, row: Row) -> bool:
    """Blocks for at least one more token of the row's windows, if need be from the least urgent rows that fill.

    Rows of this plan keep theirs: where only they are left, the row waits until they end.
    """
    while not worker.kv.room(row, 1):
        others = {state.rank(other): other for other in state.filling if other.alive and other not in fill.rows}
        last = others[max(others)]
        if last is row:
            return False
        state.preempt(last, f"preempted before step {fill.step} for {row.sequence.seq_id:#x}")
    return True


def _give_chunk(state: State, worker: Worker, fill: Fill, row: Row) -> None:
    sequence = row.sequence
    known = sequence.known
    parity = worker.facts.attention_parity
    budget = min(fill.budget, policy.affordable(fill.cost, row.scheduled, parity))
    count = worker.kv.room(row, policy.chunk(known - row.scheduled, budget, state.limits.chunk_tokens))
    if not worker.kv.plain:
        worker.kv.advance(row, count)
        if state.prefix_cache:
            worker.kv.save(row, row.scheduled)
    fill.cost -= policy.chunk_cost(count, row.scheduled, parity)
    fill.rows.append(row)
    fill.slots.append(row.slot)
    fill.positions.append(row.scheduled)
    fill.counts.append(count)
    fill.budget -= count
    row.scheduled += count
    fill.samples.append(row.scheduled == known and not sequence.pooled)
    if row.scheduled < known:
        return
    row.filled_step = fill.step
    if known + 1 == sequence.limit:
        sequence.move(Stage.ENDING, state.now_s, f"all tokens scheduled in step {fill.step}")
    elif worker.drafts.on:
        sequence.move(Stage.DRAFTING, state.now_s, f"filled in step {fill.step}")
        worker.drafts.join(row)
    else:
        sequence.move(Stage.STEPPING, state.now_s, f"filled in step {fill.step}")
        worker.rows.join(row)


def _donor(worker: Worker, sequence: Sequence, step: int) -> tuple[Row | None, bool]:
    """A sibling's row of this worker that holds the whole prompt, and whether to wait for one that is about to."""
    held = False
    if len(sequence.request.choices) > 1 and not sequence.num_output:
        for other in sequence.request.choices:
            row = other.row
            if row is not None and worker.rows.holds(row):
                if row.filled_step < step:
                    return row, False
                held = True
    return None, held


def _admit(state: State, worker: Worker, fill: Fill, sequence: Sequence, donor: Row | None) -> Row | None:
    """Gives a waiting sequence blocks for all its known tokens and a row; None if there is no space now."""
    kv, known = worker.kv, sequence.known
    if not kv.can_grow(1):
        return None
    # At least the last token is computed, since its logits are needed.
    reusable = (known - 1) // kv.block_tokens
    if sequence.pooled and sequence.pooled.mode == "mean":
        reusable = 0  # hidden states of all tokens
    if reports.unscored(sequence):  # nor what tells how probable its prompt is
        reusable, donor = min(reusable, reports.scored(sequence) // kv.block_tokens), None
    hit = kv.prefixes.of_donor(donor, reusable, known - 1) if donor is not None else None
    if hit is None:
        hit = (
            kv.prefixes.match(sequence.tokens, reusable, sequence.request.root, sequence.chain)
            if state.prefix_cache
            else None
        )
    hit = hit or kv.prefixes.nothing
    if not kv.may_admit(hit, known, worker.slots.max_rows - worker.slots.free):
        return None
    tables = kv.take(hit, known)
    computed = hit.num_blocks * kv.block_tokens
    first = sequence.cached_tokens < 0
    if first:
        found = computed if hit.donor is None else hit.donor.sequence.cached_tokens
        sequence.cached_tokens = min(found, sequence.request.num_prompt)
        state.counters["cached_tokens"] += sequence.cached_tokens
        state.counters["computed_tokens"] += sequence.request.num_prompt - sequence.cached_tokens
    if hit.donor is not None:
        computed = known - 1
        sequence.chain = hit.donor.sequence.chain[:reusable]
    state.waiting.take(sequence)
    sequence.tenant.charge((known - computed if first else 0) + 1)  # and the token that they yield
    why = f"row in step {fill.step}, {computed} of {known} tokens have KV"
    row = state.start_row(sequence, tables, computed, why)
    fill.rows_added.append(row)
    fill.added.append(
        RowStart(
            slot=row.slot,
            seq_id=sequence.seq_id,
            tokens=bytes(sequence.tokens),
            num_prompt=sequence.request.num_prompt,
            computed=computed,
            blocks=pack_i32(tables[0].blocks),
            sampling=sequence.sampling,
            first=tables[0].first,
            trace=sequence.trace and within(sequence.trace, sequence.span_id),
            tables=tuple(RowTable(table.first, pack_i32(table.blocks)) for table in tables[1:]),
        )
    )
    return row
