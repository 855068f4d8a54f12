"""All state of one worker group's core, and the moves that change where a sequence stands.

Written only under SchedulerCore.handle: by these methods, by the planner and by the results. Invariants are
recomputed in checks.py. A sequence is in exactly one place: the waiting queue, or a row of the worker's table.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import inf

import msgspec

from common.config import Kv, Scheduler
from common.kv_needs import longest_of
from common.protocol import Finished, FinishReason, ModelFacts, WorkerReady
from services.scheduler.blocks import TOKEN_BYTES, BlockPool
from services.scheduler.book import Book
from services.scheduler.draft_rows import DraftRows
from services.scheduler.ends import StopTokens
from services.scheduler.kv_groups import KvGroups
from services.scheduler.pace import Pace
from services.scheduler.past import Traced
from services.scheduler.policy import Key, Rank, can_pool, length_limit, rows_allowed
from services.scheduler.request import NEVER, Row, Sequence, Stage, Table
from services.scheduler.rows import Roster, RowTable, readdressed
from services.scheduler.slots import SlotPool
from services.scheduler.waiting import WaitingQueue


@dataclass(slots=True, eq=False)
class Worker:
    """The worker group as the core sees it: its facts, and what is handed out of it."""

    facts: ModelFacts
    longest: int  # tokens that one sequence may have
    kv: KvGroups
    pool: BlockPool  # the first one of `kv`
    slots: SlotPool
    rows: RowTable
    stops: StopTokens
    pace: Pace
    drafts: DraftRows


class Flight(msgspec.Struct):
    """A plan whose result has not come. Results list the roster's rows first, then `samplers`."""

    step: int
    roster: Roster | None = None
    tick: int = 0
    ending: Collection[Row] = ()  # roster rows whose last token this step computes
    samplers: Collection[Row] = ()  # rows whose last known token this step computes
    fillers: Collection[Row] = ()  # rows with known tokens left after this step
    pooled: Collection[Row] = ()  # rows whose prompt this step completes, which want its vector and no token
    filled: SequenceOf[
        Row
    ] = ()  # samplers, fillers and pooled in the order of the plan's columns, which follow the roster's
    added: Collection[Row] = ()
    published: Collection[int] = ()  # blocks that became findable when this plan was issued, as KvGroups labels them
    num_stepped: int = 0  # rows of the roster
    num_tokens: int = 0
    sent_s: float = 0.0
    drafted: SequenceOf[tuple[Row, int]] = ()  # DRAFTING rows with their tokens; they are then in the roster's place

    @property
    def num_filled(self) -> int:
        """Tokens of rows that fill."""
        return self.num_tokens - (sum(count for _, count in self.drafted) or self.num_stepped)


class Fault(Exception):
    """The result cannot be what the plan asked for."""


def by_key(row: Row) -> Key:
    return row.sequence.key


class State:
    """`ready` is False while no worker is there; `worker` then still holds the facts of the last one."""

    def __init__(self, limits: Scheduler, kv: Kv, hash_seed: int, book: Book | None = None) -> None:
        self.limits = limits
        self.prefix_cache = kv.prefix_cache
        self.hash_seed = hash_seed
        self.now_s = 0.0
        self.step = 0
        self.ready = False
        self.draining = False
        self.worker: Worker | None = None
        self.waiting = WaitingQueue(self.tick)
        self.filling: list[Row] = []  # by key
        self.sequences: dict[int, Sequence] = {}  # all that are not finished
        self.in_flight: deque[Flight] = deque()
        self.book = book or Book()
        self.past = self.book.past
        self.outbox = self.book.outbox

    @property
    def counters(self) -> Counter[str]:
        return self.book.counters

    def tick(self) -> int:
        """Decode plans made for the present worker."""
        return 0 if self.worker is None else self.worker.rows.tick

    def rank(self, row: Row) -> Rank:
        """Where the row's sequence would stand if all of them waited."""
        sequence = row.sequence
        return self.waiting.tenants.rank(sequence.tenant, sequence.key)

    def enqueue(self, sequence: Sequence) -> None:
        """A new sequence begins to wait."""
        self.sequences[sequence.seq_id] = sequence
        if sequence.origin != sequence.seq_id:
            self.past.names[sequence.origin] = sequence.seq_id
        if self.worker is not None:
            self.worker.stops.add(sequence.sampling)
        self.waiting.add(sequence)

    def start_row(self, sequence: Sequence, tables: list[Table], computed: int, why: str) -> Row:
        """From the queue (the caller takes it out) to a row; the blocks of `tables` are already this sequence's."""
        worker = self.worker
        assert worker is not None
        sequence.move(Stage.FILLING, self.now_s, why)
        if sequence.started_s == inf:
            sequence.started_s = self.now_s
        published = computed // worker.pool.block_tokens
        row = Row(sequence, worker.slots.take(), tables[0].blocks, computed, published, tables=tables)
        sequence.row = row
        worker.rows.open(row)
        insort(self.filling, row, key=by_key)
        return row

    def settle(self, row: Row) -> None:
        """Moves received results into the sequence and offers its full, surely computed blocks to others."""
        worker = self.worker
        assert worker is not None
        worker.rows.flush(row)
        # The newest token's KV may not be computed yet.
        self.publish(row, min(worker.rows.scheduled(row), row.sequence.known - 1))

    def settle_filled_blocks(self, tick: int) -> None:
        """`settle` for all rows that have just filled a block; they are what a decode step costs in Python."""
        worker = self.worker
        assert worker is not None
        filled = worker.rows.flush_filled_blocks(tick)
        if not self.prefix_cache:
            return
        pool, plain = worker.pool, worker.kv.plain
        block_tokens, width = pool.block_tokens, pool.block_tokens * TOKEN_BYTES
        for row in filled:
            sequence = row.sequence
            full = (row.position_base + tick + 1) // block_tokens
            last, chain = full - 1, sequence.chain
            if plain and row.published == last and len(chain) == last:
                parent = chain[-1] if last else sequence.request.root
                key = parent + sequence.tokens[last * width : full * width]
                chain.append(pool.publish_one(row.blocks[last], key))
                row.published = full
            else:
                self.publish(row, full * block_tokens)

    def publish(self, row: Row, num_tokens: int) -> list[int]:
        """Offers the row's full blocks among its first `num_tokens` tokens."""
        worker = self.worker
        assert worker is not None
        full = num_tokens // worker.pool.block_tokens
        if not self.prefix_cache or (full <= row.published and not row.saved) or row.published == NEVER:
            return []
        first, row.published = row.published, max(full, row.published)
        return worker.kv.publish(row, first, row.published)

    def preempt(self, row: Row, why: str) -> None:
        """Back to the queue; all tokens are kept, all KV is given up (what is published may be found again)."""
        row.sequence.preemptions += 1
        self._evict(row, why)
        self.counters["preemptions"] += 1

    def _evict(self, row: Row, why: str) -> None:
        self.settle(row)
        self._release(row)
        self._requeue(row.sequence, why)

    def _requeue(self, sequence: Sequence, why: str) -> None:
        sequence.move(Stage.WAITING, self.now_s, why)
        sequence.load = sequence.known
        self.waiting.add(sequence)

    def pause(self, sequence: Sequence, why: str) -> None:
        """Out of row and queue until `resume`. Its published blocks stay findable while nobody needs their space."""
        if sequence.stage in (Stage.PAUSED, Stage.ENDING):
            return
        if sequence.row is not None:
            self._evict(sequence.row, "leaves its row")
        self.waiting.remove(sequence)
        self.counters["pauses"] += 1
        sequence.move(Stage.PAUSED, self.now_s, why)

    def resume(self, sequence: Sequence) -> None:
        """Waits again, at its old place."""
        if sequence.stage is Stage.PAUSED:
            self._requeue(sequence, "resumed")

    def _release(self, row: Row) -> None:
        worker = self.worker
        assert worker is not None
        if row.sequence.stage is Stage.FILLING:
            self.filling.remove(row)
        if row.sequence.stage is Stage.DRAFTING:
            worker.drafts.leave(row)
        worker.rows.close(row)
        worker.kv.release(row)
        worker.slots.give_back(row.slot)
        row.sequence.row = None

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_token: int = -1,
        message: str = "",
        code: str = "",
        vector: bytes = b"",
    ) -> None:
        """The one terminal of a sequence, from any stage."""
        if sequence.row is not None:
            self.settle(sequence.row)
            self._release(sequence.row)
        elif sequence.stage is Stage.WAITING:
            self.waiting.remove(sequence)
        sequence.move(Stage.FINISHED, self.now_s, f"{reason.name} {message}" if message else reason.name)
        if self.worker is not None:
            self.worker.stops.remove(sequence.sampling)
        del self.sequences[sequence.seq_id]
        self.waiting.tenants.close(sequence.tenant)
        self.past.figures.ended(sequence, self.now_s)
        sequence.request.choices.remove(sequence)
        cached_tokens = max(sequence.cached_tokens, 0)
        finished = Finished(sequence.seq_id, reason, stop_token, cached_tokens, message, code, vector)
        self.past.add(sequence, finished)
        if sequence.trace:
            self.past.traced.append(Traced(sequence, finished, self.now_s))
        self.outbox.finish(finished)

    def rename(self, sequence: Sequence, seq_id: int) -> None:
        """Its tokens go where the new id says, also those of plans in flight; all received ones are in `tokens`."""
        del self.sequences[sequence.seq_id]
        self.sequences[seq_id] = sequence
        sequence.seq_id = self.past.names[sequence.origin] = seq_id
        sequence.orphaned_s = inf
        sequence.note(self.now_s, f"taken over as {seq_id:#018x}")
        row = sequence.row
        if row is not None:
            assert self.worker is not None
            self.worker.rows.flush(row)
            self.worker.rows.readdress(row)
            for flight in self.in_flight:
                if flight.roster is not None:
                    flight.roster = readdressed(flight.roster, row)

    def attach(self, ready: WorkerReady) -> None:
        """A worker that holds no rows. Sequences that it cannot serve, old or never checked, are ended."""
        facts, limits = ready.model, self.limits
        chunk, plans = limits.chunk_tokens or limits.step_tokens, limits.plans_in_flight
        kv = KvGroups(facts, self.hash_seed, chunk, plans, self.book.kv_log)
        longest = longest_of(facts)
        max_rows = rows_allowed(limits.max_rows, limits.step_tokens, ready.max_rows)
        self.worker = Worker(
            facts=facts,
            longest=longest,
            kv=kv,
            pool=kv.pools[0],
            slots=SlotPool(max_rows),
            rows=RowTable(max_rows, facts.block_tokens, limits.plans_in_flight),
            stops=StopTokens(facts.vocab_size, facts.eos_token_ids),
            pace=Pace(limits.step_deadline_s),
            drafts=DraftRows(facts.drafts, min(facts.draft_rows, max_rows)),
        )
        self.ready = True
        for sequence in list(self.sequences.values()):
            self.worker.stops.add(sequence.sampling)
            sequence.chain.clear()
            sequence.limit = length_limit(sequence.request.num_prompt, sequence.sampling.max_tokens, longest)
            largest = max(memoryview(bytes(sequence.tokens)).cast("I"))  # unsigned, so negative ids are large
            if sequence.pooled and not can_pool(sequence.pooled, facts.embedding):
                self.finish(sequence, FinishReason.ERROR, message="the worker gives no such vectors")
            elif largest >= facts.vocab_size or (sequence.known >= sequence.limit and not sequence.num_output):
                message = (
                    f"{sequence.known} tokens up to id {largest} do not fit the worker, "
                    f"which takes {longest} of a vocabulary of {facts.vocab_size}"
                )
                self.finish(sequence, FinishReason.ERROR, message=message)
            elif sequence.known >= sequence.limit:
                self.finish(sequence, FinishReason.LENGTH)

    def forget_prefixes(self) -> None:
        """Nobody finds any; rows keep what they have."""
        if self.worker is not None:
            self.worker.kv.forget()

    def detach(self, reason: str, died: bool = True) -> None:
        """The worker has gone: no KV is left, plans in flight have no results. Rows wait for the next worker.

        A death counts against the sequences that ran in it; a worker that has left on purpose (not `died`) does not.
        """
        self.ready = False
        self.in_flight.clear()
        worker = self.worker
        assert worker is not None
        for row in [row for row in worker.rows.by_slot if row is not None]:
            sequence = row.sequence
            worker.rows.flush(row)
            self._release(row)
            sequence.worker_deaths += died
            self._requeue(sequence, f"worker lost: {reason}")
            if died and sequence.worker_deaths >= self.limits.max_worker_deaths:
                message = f"the worker died {sequence.worker_deaths} times while it ran this request"
                self.finish(sequence, FinishReason.ERROR, message=message)
        worker.kv.forget()
        worker.slots.drain_removed()
