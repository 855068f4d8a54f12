"""The worker process: a blocking loop around one engine. Receives plans, runs them, sends results; decides nothing.

A new scheduler incarnation resets the engine's rows before WorkerReady is sent again. Plans are started as they come,
before results are sent, so that the device never waits for the host.
"""

import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

from common import config as configuration
from common.lifecycle import Process, scheduler_endpoint
from common.membership import Membership, by_scheduler
from common.protocol import Goodbye, Hello, Members, Progress, StepPlan, StepResult, ToWorker, WorkerReady
from common.transport import Inbox
from services.worker.beacon import Beacon
from services.worker.engine import Engine, MakeEngine, Pending

log = logging.getLogger("worker")
WAIT_S = 0.5  # how often the loop looks at the stop signal when nothing arrives


class WorkerProcess:
    def __init__(self, process: Process, make_engine: MakeEngine) -> None:
        self.process = process
        self.view = Membership(process.incarnation, process.config.links.dead_after_s)
        links = process.config.links
        self.inbox: Inbox[ToWorker] = Inbox(process.inbox_endpoint(), ToWorker, links.queue, process.counters)
        self.to_scheduler = process.push(scheduler_endpoint(process.config))
        hello = Hello(process.peer(self.inbox.endpoint), configuration.fingerprint(process.config))
        self.beacon = Beacon(process, hello, self.metrics)
        self.steps = 0
        self.step_s = 0.0
        self._make_engine = make_engine
        self._announced = False  # whether the present scheduler has our WorkerReady
        self._in_flight: deque[tuple[int, float, Pending]] = deque()  # step, start time
        self._engine: Engine | None = None  # None while it starts
        self._stopping = False

    def metrics(self) -> dict[str, float]:
        return {"steps": float(self.steps), "step_seconds": self.step_s} | (
            self._engine.figures() if self._engine else {}
        )

    def run(self) -> None:
        """Until SIGTERM. Raises what the engine raises: the process then ends with a non-zero status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.beacon.start()
        engine = self._make_engine(self.process.config, self._report)
        self._engine = engine
        self.beacon.stage = None
        self.beacon.state = "ready"
        while not self._stopping:
            # While a step is on the device, its end and the next plan are looked for by turns, without waiting.
            if self.inbox.wait(0 if self._in_flight else WAIT_S):
                self._handle(engine, self.inbox.drain())
            elif self._in_flight:
                self._flush(keep=len(self._in_flight))
            elif self.view.silent(time.monotonic(), self.process.config.links.heartbeat_s):
                self.beacon.joined = False  # a restarted scheduler learns of us only by a new Hello
        self._flush(keep=0)
        self.to_scheduler.send(Goodbye())
        self.to_scheduler.close(linger_ms=500)
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
        change = self.view.update(sender, message, time.monotonic())
        self.inbox.departed = self.view.departed
        own = self.process.incarnation
        if own in self.view.departed:
            raise RuntimeError("the scheduler has given this worker up; ending, to start afresh")
        self.beacon.joined = own in self.view.members
        if change.new_scheduler:
            self._in_flight.clear()
            engine.reset()
            self._announced = False
        if self.beacon.joined and (not self._announced or message.model is None):
            # Repeated until the scheduler has it: the link may still lead to a scheduler that has just died.
            self._announced = self.to_scheduler.send(WorkerReady(engine.facts, engine.max_rows))

    def _execute(self, engine: Engine, plan: StepPlan) -> None:
        start_s = time.perf_counter()
        self._in_flight.append((plan.step, start_s, engine.execute(plan)))
        self.steps += 1
        self.beacon.progress += 1
        self._flush(keep=1)

    def _flush(self, keep: int) -> None:
        """Sends every result that is there; waits for all but the newest `keep`."""
        while self._in_flight and (len(self._in_flight) > keep or self._in_flight[0][2].ready()):
            step, start_s, pending = self._in_flight.popleft()
            tokens = pending.tokens()
            elapsed_s = time.perf_counter() - start_s
            self.step_s += elapsed_s
            self.to_scheduler.send(StepResult(step, tokens, int(elapsed_s * 1e6), failed=pending.failed))

    def _report(self, stage: Progress) -> None:
        """Start-up progress; also counts as progress, since kernel builds may take minutes."""
        self.beacon.stage = stage
        self.beacon.progress += 1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stopping or self.beacon.state != "ready":
            sys.exit(0 if not self._stopping else 1)
        self._stopping = True


def engine_of(kind: str) -> MakeEngine:
    """The engine's constructor; torch is imported only for the model engine."""
    if kind == "null":
        from services.worker.null import NullEngine

        return NullEngine
    from services.worker.model_engine import ModelEngine

    return ModelEngine


def serve(process: Process, engine: Callable[[str], MakeEngine] = engine_of) -> None:
    WorkerProcess(process, engine(process.config.worker.kind)).run()
