"""The worker process: a blocking loop around one engine. Receives plans, runs them, sends results; decides nothing.

It belongs to the scheduler whose number is its own modulo their count, and follows when the count changes.
A new scheduler incarnation resets the engine's rows before WorkerReady is sent again. Plans are started as they come,
before results are sent, so that the device never waits for the host. The beacon watches while this thread is in a call.
"""

import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

from common import config as configuration
from common.config import Config
from common.lifecycle import Process
from common.log import follow
from common.membership import Membership, by_scheduler
from common.protocol import Goodbye, Hello, Members, Progress, StepPlan, ToWorker, WorkerReady
from common.recorder import Kind
from common.transport import Inbox, new_incarnation, scheduler_endpoint
from services.worker.beacon import Beacon, Place
from services.worker.engine import Engine, MakeEngine, Pending, result_of
from services.worker.mailbox import Mailbox
from services.worker.placement import take_seat
from services.worker.ranks import lead
from services.worker.traced import TracedRows

log = logging.getLogger("worker")
WAIT_S = 0.5  # how often the loop looks at the stop signal when nothing arrives


class Spent:
    """Steps begun, time in those that ended, and what the newest one of these took."""

    def __init__(self) -> None:
        self.steps = self.newest_us = 0
        self.step_s = 0.0


class WorkerProcess:
    def __init__(self, process: Process, make_engine: MakeEngine) -> None:
        self.process = process
        self.view = Membership(process.incarnation, process.config.links.dead_after_s)
        links = process.config.links
        self.inbox: Inbox[ToWorker] = Inbox(process.inbox_endpoint(), ToWorker, links.queue, process.counters)
        self.scheduler = process.instance % process.config.services.scheduler.replicas
        self.to_scheduler = process.push(scheduler_endpoint(process.config, self.scheduler))
        self.mailbox = Mailbox(self.inbox)
        self.beacon = Beacon(process, self._place(), self.metrics, self.mailbox)
        self.spent = Spent()
        self.traced = TracedRows(process.spans) if process.spans else None
        self._make_engine = make_engine
        self._announced = False  # whether the present scheduler has our WorkerReady
        self._in_flight: deque[tuple[int, float, Pending]] = deque()  # step, start time
        self._engine: Engine | None = None  # None while it starts
        self._stopping = False

    def _place(self) -> Place:
        hello = Hello(self.process.peer(self.inbox.endpoint), configuration.fingerprint(self.process.config))
        return Place(scheduler_endpoint(self.process.config, self.scheduler), hello)

    def metrics(self) -> dict[str, float]:
        return {"steps": float(self.spent.steps), "step_seconds": self.spent.step_s} | (
            self._engine.figures() if self._engine else {}
        )

    def run(self) -> None:
        """Until SIGTERM. Raises what the engine raises: the process then ends with a non-zero status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self.beacon.signals)
        self.beacon.start()
        engine = self._make_engine(self.process.config, self._report, self.process.instance)
        self._engine = engine
        self.beacon.stage = None
        self.beacon.state = "ready"
        self.process.record_beat("ready")
        while not self._stopping:
            # While a step is on the device, its end and the next plan are looked for by turns, without waiting.
            if self.mailbox.wait(0 if self._in_flight else WAIT_S):
                self._handle(engine, self.mailbox.drain())
            elif self._in_flight:
                self._flush(keep=len(self._in_flight))
            elif self.view.silent(time.monotonic(), self.process.config.links.heartbeat_s):
                self.beacon.joined = False  # a restarted scheduler learns of us only by a new Hello
        self._flush(keep=0)
        self.to_scheduler.send(Goodbye())
        self.to_scheduler.close(linger_ms=500)
        engine.close()
        if self.process.spans and self.traced:
            self.traced.reset()
            self.process.spans.close()
        self.beacon.end()
        self.inbox.close()

    def _handle(self, engine: Engine, batch: list[tuple[int, ToWorker]]) -> None:
        for sender, message in batch:
            if isinstance(message, Members):
                if by_scheduler(sender, message):
                    self._on_members(engine, sender, message)
                else:
                    self.process.counters.bad_frame += 1
            elif sender == self.view.scheduler:
                self._execute(engine, message)
        self._flush(keep=len(self._in_flight))

    def _on_members(self, engine: Engine, sender: int, message: Members) -> None:
        if any(m.peer.incarnation == sender and m.peer.instance != self.scheduler for m in message.members):
            return  # late word of a scheduler that this worker has left
        change = self.view.update(sender, message, time.monotonic())
        self.inbox.departed = self.view.departed
        self.process.record_beat(self.beacon.state)
        self.process.recorder.peers(change.joined, change.left)
        follow(message.log_level)
        engine.profile(self.process.config.run_dir / "profiles" if message.profile else None)
        if message.schedulers > 0 and (chosen := self.process.instance % message.schedulers) != self.scheduler:
            self._follow(engine, chosen)
            return
        own = self.process.incarnation
        if own in self.view.departed:
            raise RuntimeError("the scheduler has given this worker up; ending, to start afresh")
        member = self.view.members.get(own)
        self.beacon.joined = member is not None
        if change.new_scheduler:
            self._forget(engine)
        elif self.traced and not self._in_flight:
            self.traced.rest()
        if member is not None and (not self._announced or member.state != "ready"):
            # Repeated until the scheduler plans for us: the link may still lead to a scheduler that has just died.
            self._announced = self.to_scheduler.send(WorkerReady(engine.facts, engine.max_rows))

    def _follow(self, engine: Engine, scheduler: int) -> None:
        """Leaves for another scheduler: for both of them like a new process, but with the weights in place.

        The incarnation is a new one, because a scheduler never takes back one that has left.
        """
        log.info("this worker belongs to scheduler-%d now", scheduler)
        self.to_scheduler.send(Goodbye())
        self.to_scheduler.close(linger_ms=500)
        self.process.incarnation = new_incarnation()
        self.view = Membership(self.process.incarnation, self.process.config.links.dead_after_s)
        self.inbox.departed = self.view.departed
        self.scheduler = scheduler
        self.to_scheduler = self.process.push(scheduler_endpoint(self.process.config, scheduler))
        self.beacon.place, self.beacon.joined = self._place(), False
        self._forget(engine)

    def _forget(self, engine: Engine) -> None:
        """What another scheduler had it do."""
        self._in_flight.clear()
        self.beacon.finished = self.beacon.received
        engine.reset()
        self._announced = False
        if self.traced:
            self.traced.reset()

    def _execute(self, engine: Engine, plan: StepPlan) -> None:
        self._record(plan)
        if self.traced:
            self.traced.begin(plan, time.monotonic())
        start_s = time.perf_counter()
        self.beacon.received += 1
        pending = engine.execute(plan)
        self._in_flight.append((plan.step, start_s, pending))
        self.spent.steps += 1
        self._flush(keep=1)
        pending.settle()
        self._flush(keep=len(self._in_flight))  # on a CPU it is there now, and the next plan takes a step's time

    def _record(self, plan: StepPlan) -> None:
        """Before the step runs: it may be the last one."""
        recorder = self.process.recorder
        recorder.steps.add(Kind.STEP, 0, plan.step, self.spent.newest_us, len(plan.slots) // 4)
        for row in plan.added:
            recorder.requests.add(Kind.ROW, row.seq_id, plan.step, row.computed, row.slot)

    def _flush(self, keep: int) -> None:
        """Sends every result that is there; waits for all but the newest `keep`."""
        while self._in_flight and (len(self._in_flight) > keep or self._in_flight[0][2].ready()):
            step, start_s, pending = self._in_flight.popleft()
            pending.tokens()
            elapsed_s = time.perf_counter() - start_s
            self.spent.step_s += elapsed_s
            self.beacon.finished += 1
            self.beacon.progress += 1
            self.spent.newest_us = int(elapsed_s * 1e6)
            self.to_scheduler.send(result_of(step, pending, self.spent.newest_us))
            if self.traced:
                self.traced.end(time.monotonic())

    def _report(self, stage: Progress) -> None:
        """Start-up progress; also counts as progress, since kernel builds may take minutes."""
        self.beacon.stage = stage
        self.beacon.progress += 1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.process.recorder.life.add(Kind.SIGNAL, a=number)
        if self._stopping or self.beacon.state != "ready":
            sys.exit(0 if not self._stopping else 1)
        self._stopping = True
        self.beacon.state = "draining"


def engine_of(kind: str) -> MakeEngine:
    """The engine's constructor; torch is imported only for the model engine."""
    if kind == "null":
        from services.worker.null import NullEngine

        return NullEngine
    from services.worker.model_engine import ModelEngine

    return ModelEngine


def serve(process: Process, engine: Callable[[str], MakeEngine] = engine_of) -> None:
    """The engine is imported after the first Hello: that is how a scheduler learns that a predecessor has died."""

    def make(config: Config, report: Callable[[Progress], None], instance: int = 0) -> Engine:
        if config.worker.kind == "model" and config.worker.tensor_parallel > 1:
            return lead(config, report, instance)
        seat = take_seat(config, instance)  # before torch is imported
        return engine(config.worker.kind)(config, report, seat.number)

    WorkerProcess(process, make).run()
