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
from services.scheduler.kv_groups import KvGroups
from services.scheduler.request import Row, Stage
from services.scheduler.rows import U32
from services.scheduler.state import Fault, Flight, State, Worker

MakeRoom = Callable[[Row], bool]
Planned = list[tuple[Row, int]]  # rows, and how many tokens of each


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


def has_block(row: Row, position: int, block_tokens: int) -> bool:
    """Whether it has one for that position in each table of pages, which grow together."""
    return position < row.tables[0].end * block_tokens


def plan_rows(
    state: State, worker: Worker, flight: Flight, alone: bool, make_room: MakeRoom
) -> tuple[bytes, bytes, bool]:
    """Gives every DRAFTING row its newest token and drafts, and blocks for them; a row that may already have reached
    its limit waits for its results. Not `alone`: chunks fill the step, which then has no room to spare for drafts.

    Returns the plan's columns `grown_slots` and `grown_blocks`, and whether blocks were short.
    """
    rows, kv = [row for _, row in sorted(worker.drafts.rows.items())], worker.kv
    most = min(worker.drafts.tokens, state.limits.step_tokens // max(len(rows), 1) - 1) if alone else 0
    every = kv.every if state.prefix_cache else 0
    wanted = [(row, count) for row in rows if (count := _count(row, most, every))]
    if not kv.plain:
        for row, _ in wanted:
            kv.slide(row, row.sequence.known - 1)  # where it stands if no draft in flight holds
    lacking = [row for row, count in wanted for _ in range(_missing(row, count, kv.block_tokens))]
    short = not kv.can_grow(len(lacking))
    if short:
        wanted, grown = _grow_for_one(state, kv, wanted, make_room)
        columns = [(row.slot, row.blocks[-1]) for row in grown]
    else:
        blocks = kv.grow(lacking) if lacking else []
        columns = [(row.slot, block) for row, block in zip(lacking, blocks, strict=True)]
    for row, count in wanted:
        if every:
            kv.save(row, row.scheduled)
        row.scheduled += count
    flight.drafted = wanted
    flight.num_stepped, flight.num_tokens = len(wanted), sum(count for _, count in wanted)
    return pack_i32(slot for slot, _ in columns), pack_i32(block for _, block in columns), short


def _grow_for_one(state: State, kv: KvGroups, wanted: Planned, make_room: MakeRoom) -> tuple[Planned, list[Row]]:
    """Where blocks are short: no drafts, and the most urgent first. Returns what is planned, and the rows that grew."""
    grown = []
    for row, _ in sorted(wanted, key=lambda each: state.rank(each[0])):
        if not row.alive or has_block(row, row.scheduled, kv.block_tokens):
            continue
        # Results will tell which of its window's blocks it may give back: nobody need yield to it before.
        waits = kv.has_windows and row.scheduled > row.sequence.known - 1 and not kv.can_grow(1)
        if not waits and make_room(row):
            grown.append(row)
    planned = [(row, 1) for row, _ in wanted if row.alive and has_block(row, row.scheduled, kv.block_tokens)]
    return planned, [row for row in grown if row.alive]


def _count(row: Row, most: int, every: int) -> int:
    """Tokens of the row in the next plan; 0: it waits for its results. `every`: tokens between checkpoints, 0: none."""
    sequence = row.sequence
    left = sequence.limit - 1 - row.scheduled
    if left <= 0:
        return 0
    drafts = min(most, left - 1) if may_draft(sequence.sampling, sequence.num_output) else 0
    if every:
        # A state holds what comes before a step's drafts, so the last token before a checkpoint comes without any.
        before = every - 1 - row.scheduled % every
        if not before:
            return int(row.scheduled == sequence.known - 1)
        drafts = min(drafts, before - 1)
    return 1 + drafts


def _missing(row: Row, count: int, block_tokens: int) -> int:
    """Blocks of each of its tables of pages."""
    return max(-(-(row.scheduled + count) // block_tokens) - row.tables[0].end, 0)


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
