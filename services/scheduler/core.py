"""The scheduler of one worker group: events in, effects out. No I/O, no clock, no randomness.

`apply` and `plans` are the only mutators, and `handle` is both; the core owns `State` and hands it to the planner and
the results. The fleet, of whose groups this is one, carries out nothing itself: effects go to the book that its cores
share, and the process shell carries them out in order (plans come first).
Every admitted sequence gets exactly one Finished; nothing that a peer sends makes `handle` raise.
"""

from collections.abc import Callable, Iterable
from typing import Any

from common.config import Kv, Scheduler
from common.errors import Reject, RejectReason
from common.protocol import (
    Abort,
    Admit,
    FinishReason,
    Load,
    Pause,
    Refused,
    StepPlan,
    StepResult,
    Stop,
    WorkerReady,
    api_of,
    tokenizer_of,
)
from services.scheduler import checks
from services.scheduler.admission import sequences_of
from services.scheduler.book import Book
from services.scheduler.drain import DrainRate
from services.scheduler.events import (
    ApiLost,
    Drain,
    Effect,
    Event,
    Flush,
    SendPlan,
    SendRefused,
    SendTokens,
    Tick,
    TokenizerLost,
    WorkerFault,
    WorkerLost,
)
from services.scheduler.orphans import give_up, orphan, outdated, take_over
from services.scheduler.planner import make_plan
from services.scheduler.policy import MOST_DRAFTS, absurd
from services.scheduler.request import Journal, Sequence, story_lines
from services.scheduler.results import apply_result
from services.scheduler.state import Fault, State

MAX_ID = 2**64
COUNTERS = (
    "requests",
    "refused",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "queue_full|max_num_queued_reqs",
    "queue_full|max_num_queued_tokens",
    "output_tokens",
    "preemptions",
    "pauses",
    "worker_faults",
    "stuck_steps",
    "failed_steps",
    "out_of_memory",
    "unknown_results",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "draft_switches",
    *(f"accepted_at_{place}" for place in range(MOST_DRAFTS)),
)


class SchedulerCore:
    """`seed` (64 bits) keys the prefix cache's hashes; draw it per process.

    `recover_s`: how long a sequence that has lost its tokenizer may wait for another one.
    """

    def __init__(
        self, limits: Scheduler, kv: Kv, seed: int = 0, recover_s: float = 30.0, book: Book | None = None
    ) -> None:
        self._book = book or Book()
        self._state = State(limits, kv, seed, self._book)
        self.state = self._state  # for the fleet, which moves sequences between groups
        self._recover_s = recover_s
        self._drain_rate = DrainRate()
        self._effects = self._book.effects
        self.left_over = 0  # sequences that still waited after the last plan
        self.changed = False  # something was applied since the last plans
        self._handlers: dict[type, Callable[[Any], None]] = {
            StepResult: self._on_step_result,
            Admit: self._on_admit,
            Stop: self._on_stop,
            Abort: self._on_abort,
            Pause: self._on_pause,
            WorkerReady: self._on_worker_ready,
            WorkerLost: self._on_worker_lost,
            TokenizerLost: self._on_tokenizer_lost,
            ApiLost: self._on_api_lost,
            Drain: self._on_drain,
            Flush: lambda _: self._state.forget_prefixes(),
            Tick: self._on_tick,
        }

    def handle(self, events: Iterable[Event], now_s: float) -> list[Effect]:
        """Applies events in order, then plans as many steps as the worker may have in flight.

        `now_s` dates the stories and bounds how long orphans are kept. A token batch never mixes two steps.
        """
        for event in events:
            self.apply(event, now_s)
        return [*map(SendPlan, self.plans()), *self._book.drain()]

    def apply(self, event: Event, now_s: float) -> None:
        """What it asks for goes to the book."""
        self._state.now_s = now_s
        self.changed = True
        self._handlers[type(event)](event)

    def plans(self) -> list[StepPlan]:
        """All that the worker can take now."""
        state = self._state
        self.changed = False
        plans: list[StepPlan] = []
        most = state.limits.plans_in_flight
        if state.ready and len(state.in_flight) < most:
            while len(state.in_flight) < most:
                plan = make_plan(state)
                if plan is None:
                    break
                plans.append(plan)
            self.left_over = len(state.waiting)
        return plans

    def tell(self, journal: Journal) -> None:
        """Each event of a sequence's story also goes there, from now on."""
        self._state.past.journal = journal

    @property
    def idle(self) -> bool:
        """Nothing is open: a draining scheduler may leave."""
        return not self._state.sequences

    def work(self) -> tuple[int, int]:
        """Sequences for which a plan is due, and plans made: while one is in flight it is the worker that owes."""
        state = self._state
        due = state.ready and not state.in_flight
        return len(state.sequences) if due else 0, state.step

    def metrics(self) -> dict[str, float]:
        """Figures by the names of common/metrics.py."""
        counters = self._state.counters
        return {name: float(counters[name]) for name in COUNTERS} | {
            "open_requests": float(len(self._state.sequences)),
            "steps": float(self._state.step),
        }

    def load(self) -> Load:
        state = self._state
        worker, tokens = state.worker, state.waiting.tokens
        wait_s = self._drain_rate.wait_s(tokens)
        if worker is None:
            return Load(waiting=len(state.waiting), waiting_tokens=tokens, wait_s=wait_s)
        pools = worker.kv.pools
        idle = sum(pool.idle_blocks for pool in pools)
        return Load(
            running=worker.slots.max_rows - worker.slots.free,
            waiting=len(state.waiting),
            blocks_total=sum(pool.num_blocks for pool in pools),
            blocks_free=sum(pool.free_blocks for pool in pools) - idle,
            blocks_cached=idle,
            steps=state.step,
            tokens_in_flight=sum(flight.num_tokens for flight in state.in_flight),
            waiting_tokens=tokens,
            wait_s=wait_s,
        )

    def fragmentation(self) -> float:
        """Reserved but unused KV tokens / reserved KV tokens."""
        worker = self._state.worker
        if worker is None:
            return 0.0
        rows = [row for row in worker.rows.by_slot if row is not None]
        return worker.kv.fragmentation(sum(worker.kv.unused_tokens(row, worker.rows.scheduled(row)) for row in rows))

    def story(self, seq_id: int) -> list[str]:
        """What happened to a sequence, oldest first; empty if it is unknown or long forgotten."""
        past = self._state.past
        sequence = self._state.sequences.get(past.name(seq_id))
        if sequence is not None:
            return sequence.story()
        ended = past.find(seq_id)
        return [] if ended is None else story_lines(ended.finished.seq_id, ended.log)

    def check(self) -> None:
        """Recomputes all invariants. Raises AssertionError."""
        checks.check(self._state)

    def _on_step_result(self, result: StepResult) -> None:
        state = self._state
        flights = state.in_flight
        if not flights or not flights[0].step <= result.step <= flights[-1].step:
            state.counters["unknown_results"] += 1
            return
        try:
            apply_result(state, result)
        except Fault as fault:
            state.counters["worker_faults"] += 1
            self._give_up_worker(str(fault))
        self._effects += state.outbox.drain()

    def _give_up_worker(self, reason: str) -> None:
        self._state.detach(reason)
        self._effects.append(WorkerFault(reason))

    def _on_admit(self, admit: Admit) -> None:
        state = self._state
        if not 0 <= admit.seq_id <= admit.seq_id + max(admit.n, 1) <= MAX_ID:
            state.counters["unknown_results"] += 1
            return
        if admit.again:
            state.past.forget(admit.seq_id)
        if admit.origin >= 0:
            if outdated(state, admit):
                state.counters["unknown_results"] += 1
                return
            if (batch := take_over(state, admit)) is not None:
                self._effects.append(SendTokens(tokenizer_of(admit.seq_id), batch))
                return
        if admit.attach:
            unknown = Refused(admit.seq_id, RejectReason.NOT_FOUND, "this scheduler does not have it")
            self._effects.append(SendRefused(tokenizer_of(admit.seq_id), unknown))
            return
        try:
            sequences = self._new_sequences(admit)
        except Reject as reject:
            state.counters["refused"] += 1
            refused = Refused(admit.seq_id, reject.reason, reject.message, reject.param)
            self._effects.append(SendRefused(tokenizer_of(admit.seq_id), refused))
            return
        if sequences:
            state.outbox.accept(admit.seq_id)
        state.waiting.arrivals += len(sequences)
        state.counters["requests"] += len(sequences)
        state.counters["prompt_tokens"] += sum(sequence.request.num_prompt for sequence in sequences)
        for sequence in sequences:
            state.enqueue(sequence)
            # An output that came with the request may have been whole.
            if sequence.num_output and sequence.known >= sequence.limit:
                state.finish(sequence, FinishReason.LENGTH)

    def _new_sequences(self, admit: Admit) -> list[Sequence]:
        state = self._state
        if admit.n > state.limits.max_waiting:
            raise Reject(RejectReason.INVALID, f"n may be at most {state.limits.max_waiting}, not {admit.n}", "n")
        seq_ids = range(admit.seq_id, admit.seq_id + admit.n)
        past = state.past
        if any(seq_id in state.sequences or seq_id in past or past.name(seq_id) != seq_id for seq_id in seq_ids):
            state.counters["unknown_results"] += 1
            return []
        return sequences_of(state, admit)

    def _on_stop(self, stop: Stop) -> None:
        self._end(stop.seq_id, FinishReason.STOP_STRING)

    def _on_abort(self, abort: Abort) -> None:
        self._end(abort.seq_id, FinishReason.ABORT)

    def _on_pause(self, pause: Pause) -> None:
        sequence = self._state.sequences.get(self._state.past.name(pause.seq_id))
        if sequence is None:
            return  # it has ended meanwhile
        if pause.paused:
            self._state.pause(sequence, "paused, the client does not read")
        else:
            self._state.resume(sequence)

    def _end(self, seq_id: int, reason: FinishReason) -> None:
        sequence = self._state.sequences.get(self._state.past.name(seq_id))
        if sequence is None:
            self._state.counters["unknown_results"] += 1
        else:
            self._state.finish(sequence, reason)

    def _on_worker_ready(self, ready: WorkerReady) -> None:
        state = self._state
        if wrong := absurd(ready):
            self._effects.append(WorkerFault(f"a worker that can run nothing: {wrong}"))
            return
        if state.ready:
            state.detach("restarted")
        state.attach(ready)

    def _on_worker_lost(self, lost: WorkerLost) -> None:
        if self._state.ready:
            self._state.detach(lost.reason, lost.died)

    def _on_tokenizer_lost(self, lost: TokenizerLost) -> None:
        orphan(self._state, lost.instance)

    def _on_api_lost(self, lost: ApiLost) -> None:
        for seq_id in [seq_id for seq_id in self._state.sequences if api_of(seq_id) == lost.instance]:
            self._end(seq_id, FinishReason.ABORT)

    def _on_drain(self, _: Drain) -> None:
        self._state.draining = True

    def _on_tick(self, _: Tick) -> None:
        """All frames that have come were handed over before. Planning after the events is done anyway."""
        state = self._state
        give_up(state, self._recover_s)
        state.outbox.tell_accepted()
        self._drain_rate.look(state.now_s, state.waiting.drained, state.waiting.tokens)
        if state.in_flight and state.worker is not None:
            oldest = state.in_flight[0]
            rows, tokens = oldest.num_stepped, oldest.num_filled
            if stuck := state.worker.pace.overdue(oldest.sent_s, rows, tokens, state.now_s):
                state.counters["stuck_steps"] += 1
                self._give_up_worker(f"step {oldest.step} is stuck: {stuck}")
