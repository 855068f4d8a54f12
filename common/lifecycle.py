"""How every process starts, joins, beats, drains and ends.

`main` parses the command line, sets up logs and signals, and runs one `serve(process)` coroutine: SIGTERM or SIGINT
sets `process.stopping` (drain and return), a second one ends at once. A fault, also one inside a callback of the loop,
ends the process with a non-zero exit status. `Node` keeps an asyncio process a member of the system.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NoReturn, TypeVar

import msgspec
import psutil
import uvloop

from common import config as configuration
from common import crash, env, lease, log
from common.config import Config
from common.errors import EXIT_CONFIG, ConfigError
from common.membership import Change, Membership, by_scheduler
from common.metrics import checked, link_metrics
from common.protocol import Goodbye, Heartbeat, Hello, Members, Peer, Progress, ServiceName, State
from common.pulse import Pulses
from common.recorder import Kind, Recorder
from common.run_dir import make_run_dir
from common.tracing import Spans, open_spans
from common.transport import AsyncInbox, LinkCounters, Push, new_incarnation, scheduler_endpoint, secure

T = TypeVar("T")
HELLO_S = 0.05  # between Hellos to a scheduler that does not know us


class Process:
    """What one process is: its identity, settings and stop signal."""

    def __init__(self, service: ServiceName, instance: int, config: Config) -> None:
        self.service: ServiceName = service
        self.instance = instance
        self.config = config
        self.incarnation = new_incarnation()
        self.since_s = time.time()
        self.counters = LinkCounters()
        self.stopping = asyncio.Event()
        self.recorder = Recorder()  # `start` gives it a file
        self.spans: Spans | None = None  # `start` makes them, if traces are on
        self._usage = psutil.Process()
        self._used: dict[str, float] = {}

    def inbox_endpoint(self) -> str:
        """Where this process binds. Unique per process start, so that no stale peer ever talks to a new process."""
        links = self.config.links
        if links.transport == "tcp":
            return f"tcp://{links.host}:0"
        return f"ipc://{self.config.run_dir}/{self.service}-{self.instance}.{self.incarnation & 0xFFFFFFFF:08x}"

    @property
    def beat_gap_s(self) -> float:
        """A process whose own beats are further apart than this was stopped in between."""
        return self.config.links.heartbeat_s + self.config.links.dead_after_s / 2

    def peer(self, endpoint: str) -> Peer:
        return Peer(self.service, self.instance, self.incarnation, endpoint, os.getpid(), self.since_s)

    def push(self, endpoint: str) -> Push:
        return Push(endpoint, self.incarnation, self.config.links.queue, self.counters)

    def record_beat(self, state: State) -> None:
        """Once per heartbeat, from the main thread."""
        counters = self.counters
        refused, unread = counters.refused, counters.bad_frame + counters.bad_version
        self.recorder.beat(state, refused, unread, self.config.links.heartbeat_s)

    def usage(self) -> dict[str, float]:
        """Metrics that every process has. Without a descriptor to read them they are those of the last time."""
        with contextlib.suppress(OSError):
            cpu = self._usage.cpu_times()
            resident = float(self._usage.memory_info().rss)
            self._used = {"resident_bytes": resident, "cpu_seconds": cpu.user + cpu.system}
        return link_metrics(self.counters) | self._used


class Node(Generic[T]):
    """Keeps an asyncio process (API, tokenizer) a member of every scheduler's system and connected to all peers.

    The owner sets `state`, `progress` and `stage`, adds to `pulses`, reads `view`; it sends with `send`, `tell` and
    `tell_all`.
    """

    def __init__(
        self,
        process: Process,
        union: Any,
        handler: Callable[[list[tuple[int, T]]], None],
        on_change: Callable[[Change], None],
        metrics: Callable[[], dict[str, float]],
        histograms: Callable[[], dict[str, bytes]] = dict,
    ) -> None:
        self.process = process
        self.view = Membership(process.incarnation, process.config.links.dead_after_s)
        self.state: State = "starting"
        self.progress = 0
        self.stage: Progress | None = None
        self.pulses = Pulses(process.beat_gap_s)
        self._handler, self._on_change = handler, on_change
        self._metrics, self._histograms = metrics, histograms
        links = process.config.links
        self.inbox: AsyncInbox[T] = AsyncInbox(process.inbox_endpoint(), union, links.queue, process.counters)
        self._schedulers: dict[int, Push] = {}  # by instance
        self._links: dict[int, Push] = {}  # to the others, by incarnation
        self._hello = Hello(process.peer(self.inbox.endpoint), configuration.fingerprint(process.config))
        self._start_s = time.monotonic()
        self._follow(process.config.services.scheduler.replicas)

    def send(self, incarnation: int, message: msgspec.Struct) -> bool:
        """To one peer; False if it is not a member or its link is full."""
        link = self._links.get(incarnation)
        return link is not None and link.send(message)

    def tell(self, scheduler: int, message: msgspec.Struct) -> bool:
        """To the scheduler of this instance; False if there shall be none or its link is full."""
        link = self._schedulers.get(scheduler)
        return link is not None and link.send(message)

    def tell_all(self, message: msgspec.Struct) -> bool:
        """To all schedulers; False if one could not be told."""
        sent = [link.send(message) for link in self._schedulers.values()]
        return all(sent)

    @property
    def schedulers(self) -> list[int]:
        """Instances that there should be, whether they speak or not."""
        return sorted(self._schedulers)

    @property
    def joined(self) -> bool:
        """Listed by a scheduler that still speaks. A restarted one learns of us only by a new Hello."""
        return any(self._knows_us(instance, time.monotonic()) for instance in self._schedulers)

    def _knows_us(self, instance: int, now_s: float) -> bool:
        view = self.view.views.get(instance)
        heartbeat_s = self.process.config.links.heartbeat_s
        return view is not None and not view.silent(now_s, heartbeat_s) and self.view.lists_us(instance)

    def beat(self) -> None:
        """One heartbeat to every scheduler, with a Hello before it for those who do not list us."""
        now_s = time.monotonic()
        self.process.record_beat(self.state)
        beat = self._heartbeat(now_s)
        for instance, link in self._schedulers.items():
            known = self._knows_us(instance, now_s)
            if not known:
                link.send(self._hello_now())
            if known or self._expected(instance, now_s):  # what is down for long shall not find a pile of old beats
                link.send(beat)

    def _heartbeat(self, now_s: float) -> Heartbeat:
        values = checked(self._metrics() | self.process.usage() | self.pulses.figures(now_s))
        return Heartbeat(self.state, self.progress, self.stage, values, self._histograms())

    def _hello_now(self) -> Hello:
        """A scheduler that starts afresh learns from it what processes have counted that are gone."""
        return msgspec.structs.replace(self._hello, ledger=self.view.ledger) if self.view.ledger else self._hello

    def _expected(self, instance: int, now_s: float) -> bool:
        """Whether a scheduler that does not know us may be there any moment."""
        view = self.view.views.get(instance)
        since_s = self._start_s if view is None else max(view.heard_s, self._start_s)
        return now_s - since_s <= self.process.config.links.recover_s

    async def run(self) -> None:
        """Receives and beats until cancelled."""
        self.inbox.start(self._receive)
        heartbeat_s, beat_s = self.process.config.links.heartbeat_s, float("-inf")
        while True:
            now_s = time.monotonic()
            strange = [each for each in self._schedulers if not self._knows_us(each, now_s)]
            alone = len(strange) == len(self._schedulers)
            expected = [each for each in strange if self._expected(each, now_s)]
            if now_s - beat_s >= heartbeat_s or alone:
                self.beat()
                beat_s = now_s
            else:
                for instance in expected:
                    self._schedulers[instance].send(self._hello_now())
            await asyncio.sleep(HELLO_S if alone or expected else max(beat_s + heartbeat_s - now_s, 0.001))

    def leave(self) -> None:
        """Says Goodbye and closes every link."""
        self.tell_all(Goodbye())
        for link in (*self._schedulers.values(), *self._links.values()):
            link.close(linger_ms=200)
        self._schedulers.clear()
        self._links.clear()
        self.inbox.close()

    def _receive(self, batch: list[tuple[int, Any]]) -> None:
        others = []
        for received in batch:
            if type(received[1]) is not Members:
                others.append(received)
            elif by_scheduler(*received):
                self._apply(*received)
            else:
                self.process.counters.bad_frame += 1
        if others:
            self._handler(others)

    def _apply(self, sender: int, message: Members) -> None:
        change = self.view.update(sender, message, time.monotonic())
        if self.view.instance_of(sender) is None:
            return  # late word of a scheduler that has been replaced
        self.inbox.departed = self.view.departed
        if self.process.incarnation in self.view.departed:
            raise RuntimeError("every scheduler that speaks has given this process up; ending, to start afresh")
        self._follow(self.view.count)
        log.follow(message.log_level)
        if change.new_scheduler:
            self._greet(change.scheduler)
        self.process.recorder.peers(change.joined, change.left)
        for peer in change.left:
            if link := self._links.pop(peer.incarnation, None):
                link.close()
        for peer in change.joined:
            if peer.incarnation != self.process.incarnation and peer.service != "scheduler":
                self._links[peer.incarnation] = self.process.push(peer.endpoint)
        self._on_change(change)

    def _greet(self, instance: int) -> None:
        """A scheduler that speaks for the first time hears at once who we are, and how we are."""
        if not self.view.lists_us(instance):
            self.tell(instance, self._hello_now())
        self.tell(instance, self._heartbeat(time.monotonic()))

    def _follow(self, count: int) -> None:
        """Links to as many schedulers as there should be (0: no change), and to those beyond that still speak."""
        for instance in range(count):
            if instance not in self._schedulers:
                self._schedulers[instance] = self.process.push(scheduler_endpoint(self.process.config, instance))
        now_s = time.monotonic()
        for instance in [each for each in self._schedulers if count and each >= count]:
            if self.view.lost(instance, now_s):
                self._schedulers.pop(instance).close()


def main(service: ServiceName, serve: Callable[[Process], Coroutine[Any, Any, None]]) -> NoReturn:
    """The whole life of an asyncio service process."""
    process = start(service)
    fault: list[dict[str, Any]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(serve(process))

        def on_fault(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            fault.append(context)
            task.cancel()

        def on_signal() -> None:
            process.recorder.life.add(Kind.SIGNAL, a=signal.SIGTERM)
            if process.stopping.is_set():
                os._exit(1)
            process.stopping.set()

        loop.set_exception_handler(on_fault)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        try:
            await task
        except asyncio.CancelledError:
            if not fault:
                raise

    try:
        uvloop.run(run())
    except ConfigError as error:
        end_on_config(error)
    if process.spans:
        process.spans.close()
    for context in fault:
        if cause := context.get("exception"):
            process.recorder.fault(cause)
        logging.getLogger(service).critical(
            "fault: %s", log.words_of(context), exc_info=context.get("exception") or None
        )
    sys.exit(1 if fault else 0)


def start(service: ServiceName) -> Process:
    """Command line, settings, logs and run directory of a service process. Exits with EXIT_CONFIG on bad settings."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}")
    parser.add_argument("--instance", default="0", help="number of this replica; auto: the lowest that is free")
    parser.add_argument("--config", default=env.config_path(), help="TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="one setting")
    arguments = parser.parse_args()
    try:
        env.check()
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # it holds prompts
        config = configuration.load(arguments.config, env.settings() + arguments.set)
        make_run_dir(config.run_dir)
        secure(config.links)
        instance = number_of(arguments.instance, service, config)
        spans = open_spans(config.traces, service, instance)
    except ConfigError as error:
        end_on_config(error)
    log.set_up(f"{service}-{instance}", config.log.level, config.log.format)
    process = Process(service, instance, config)
    process.spans = spans
    process.recorder = crash.arm(config.run_dir, process.peer(""), configuration.fingerprint(config))
    return process


def number_of(text: str, service: ServiceName, config: Config) -> int:
    """What `--instance` says. A number that is taken is this process's until it ends. Raises ConfigError."""
    if text == "auto":
        return lease.take(config.run_dir, service).number
    if not text.isdecimal():
        raise ConfigError(f"--instance is a number or auto, not {text!r}")
    return int(text)


def end_on_config(error: ConfigError) -> NoReturn:
    """Tells the person what is wrong and ends with the status that a supervisor does not answer by a restart."""
    print(f"configuration: {error}", file=sys.stderr)
    sys.exit(EXIT_CONFIG)
