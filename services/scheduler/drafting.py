"""Plans and results of rows that step with drafts. Called by the planner and the results; the rows are in DraftRows.

The worker proposes drafts and says in its result how many held. Two plans are in flight, so a plan is made before that
is known: it reserves blocks as if all drafts held, and names the positions that this would give; the result takes back
what did not. The worker alone knows where a row stands. Invariant (checks.py): a row's `scheduled` is its known tokens
less one, plus all that plans in flight compute of it, never beyond its limit.
"""

from collections.abc import Callable
from typing import NamedTuple

from common.columns import pack_i32, pack_u64
from common.protocol import FinishReason, Sampling, StepResult, tokenizer_of
from services.scheduler.blocks import BlockPool
from services.scheduler.request import Row, Stage
from services.scheduler.rows import U32
from services.scheduler.state import Fault, Flight, State, Worker

MakeRoom = Callable[[Row], bool]


def must_wait(state: State, worker: Worker) -> bool:
    """Rows begin or cease to draft when nothing is in flight; this says to wait for that."""
    drafts = worker.drafts
    if not drafts.tokens:
        return False
    stepping = worker.rows.roster()
    rows = len(drafts.rows) or stepping.size
    if not rows or drafts.switch.wants(rows) is drafts.on:
        return False
    if state.in_flight:
        return True
    drafts.on = not drafts.on
    state.counters["draft_switches"] += 1
    if drafts.on:
        for slot in stepping.slots.tolist():
            row = worker.rows.by_slot[slot]
            assert row is not None
            worker.rows.part(row)
            row.sequence.move(Stage.DRAFTING, state.now_s, "drafts pay again")
            drafts.join(row)
    else:
        for row in list(drafts.rows.values()):
            drafts.leave(row)
            row.sequence.move(Stage.STEPPING, state.now_s, "drafts do not pay")
            worker.rows.join(row)
    return False


def may_draft(sampling: Sampling, num_output: int) -> bool:
    """Whether logits of a later token do not depend on the drafts before it, nor on how many of them hold."""
    looks_back = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
    looks_back = looks_back or any(len(word) > 1 for word in sampling.words.banned)
    return not looks_back and sampling.grammar is None and num_output >= sampling.min_tokens


def has_block(row: Row, position: int, pool: BlockPool) -> bool:
    """Whether it has one for that position, from drafts that did not hold."""
    return position < len(row.blocks) * pool.block_tokens


def plan_rows(
    state: State, worker: Worker, flight: Flight, alone: bool, make_room: MakeRoom
) -> tuple[bytes, bytes, bool]:
    """Gives every DRAFTING row its newest token and drafts, and blocks for them; a row that may already have reached
    its limit waits for its results. Not `alone`: chunks fill the step, which then has no room to spare for drafts.

    Returns the plan's columns `grown_slots` and `grown_blocks`, and whether blocks were short.
    """
    rows = [row for _, row in sorted(worker.drafts.rows.items())]
    most = min(worker.drafts.tokens, state.limits.step_tokens // max(len(rows), 1) - 1) if alone else 0
    wanted = [(row, _count(row, most)) for row in rows if row.scheduled < row.sequence.limit - 1]
    pool = worker.kv.pools[0]
    needed = sum(_missing(row, count, pool) for row, count in wanted)
    short = not pool.can_allocate(needed)
    if short:
        # No drafts then, and the most urgent first.
        grown = []
        for row, _ in sorted(wanted, key=lambda each: state.rank(each[0])):
            if row.alive and not has_block(row, row.scheduled, pool) and make_room(row):
                grown.append(row)
        wanted = [(row, 1) for row, _ in wanted if row.alive]
        columns = [(row.slot, row.blocks[-1]) for row in grown if row.alive]
    else:
        columns = []
        for row, count in wanted:
            if missing := _missing(row, count, pool):
                blocks = pool.allocate(missing)
                row.blocks += blocks
                columns += [(row.slot, block) for block in blocks]
    for row, count in wanted:
        row.scheduled += count
    flight.drafted = wanted
    flight.num_stepped, flight.num_tokens = len(wanted), sum(count for _, count in wanted)
    return pack_i32(slot for slot, _ in columns), pack_i32(block for _, block in columns), short


def _count(row: Row, most: int) -> int:
    sequence = row.sequence
    if not may_draft(sequence.sampling, sequence.num_output):
        return 1
    return 1 + min(most, sequence.limit - 2 - row.scheduled)


def _missing(row: Row, count: int, pool: BlockPool) -> int:
    return max(-(-(row.scheduled + count) // pool.block_tokens) - len(row.blocks), 0)


def columns(flight: Flight) -> tuple[bytes, bytes, bytes, bytes]:
    """The plan's columns slots, positions, counts and samples of these rows."""
    return (
        pack_i32(row.slot for row, _ in flight.drafted),
        pack_i32(row.scheduled - count for row, count in flight.drafted),
        pack_i32(count for _, count in flight.drafted),
        b"\x01" * len(flight.drafted),
    )


class Drafted(NamedTuple):
    """What a result says of the rows of a step with drafts."""

    counts: bytes
    tried: bytes
    num_tokens: int  # of all rows that sampled


def read_counts(flight: Flight, result: StepResult, num_samples: int) -> Drafted | None:
    """None: the step had no drafts. Raises Fault for counts that the plan does not allow."""
    planned = flight.drafted
    counts, tried = result.counts, result.drafted
    if not planned:
        if counts:
            raise Fault(f"step {flight.step} counts the tokens of {len(counts)} rows, but had no drafts")
        return None
    if len(counts) != num_samples or len(tried) != num_samples:
        raise Fault(f"step {flight.step} counts the tokens of {len(counts)} rows instead of {num_samples}")
    for (_, most), count, drafts in zip(planned, counts, tried, strict=False):
        if not 1 <= count <= 1 + drafts <= most:
            raise Fault(f"step {flight.step} gave {count} tokens with {drafts} drafts for a row of {most}")
    if counts[len(planned) :].count(1) != num_samples - len(planned):
        raise Fault(f"step {flight.step} gave more than one token for a row without drafts")
    return Drafted(counts, tried, sum(counts))


def apply(state: State, worker: Worker, flight: Flight, drafted: Drafted, tokens: U32, flags: bytes) -> None:
    """The tokens of the DRAFTING rows, which come first; `flags`: which of all tokens may end a sequence."""
    end = 0
    for (row, planned), count, tried in zip(flight.drafted, drafted.counts, drafted.tried, strict=False):
        begin, end = end, end + count
        row.scheduled -= planned - count
        if not row.alive:
            continue
        if tried:
            _measure(state, tried, count - 1)
        _receive(state, worker, row, tokens[begin:end], flags[begin:end])


def _measure(state: State, tried: int, accepted: int) -> None:
    counters = state.counters
    counters["drafts"] += 1
    counters["draft_tokens"] += tried
    counters["accepted_tokens"] += accepted
    for place in range(accepted):
        counters[f"accepted_at_{place}"] += 1


def _receive(state: State, worker: Worker, row: Row, tokens: U32, flags: bytes) -> None:
    """New tokens of one row; what follows an end is nobody's."""
    sequence = row.sequence
    first, reason, last = sequence.num_output, None, -1
    place = flags.find(1)
    while place >= 0 and reason is None:
        last = int(tokens[place])
        reason = worker.stops.reason(sequence.sampling, last, first + place)
        if reason is not None:
            tokens = tokens[: place + 1]
        place = flags.find(1, place + 1)
    count = len(tokens)
    sequence.tokens += tokens.tobytes()
    sequence.tenant.charge(count)
    seq_ids, indices = pack_u64([sequence.seq_id] * count), pack_i32(range(first, first + count))
    state.outbox.add_rows(tokenizer_of(sequence.seq_id), seq_ids, indices, tokens.tobytes())
    if reason is not None:
        state.finish(sequence, reason, last)
    elif sequence.known == sequence.limit:
        state.finish(sequence, FinishReason.LENGTH)
    else:
        state.publish(row, sequence.known - 1)
