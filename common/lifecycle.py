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
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import msgspec
import psutil
import uvloop

from common import config as configuration
from common import env, log
from common.config import Config
from common.errors import ConfigError
from common.membership import Change, Membership
from common.metrics import checked, link_metrics
from common.protocol import Goodbye, Heartbeat, Hello, Members, Peer, Progress, ServiceName, State
from common.transport import AsyncInbox, LinkCounters, Push, new_incarnation

T = TypeVar("T")
EXIT_CONFIG = 78  # sysexits.h EX_CONFIG: starting again will not help


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
        self._usage = psutil.Process()
        self._used: dict[str, float] = {}

    def inbox_endpoint(self) -> str:
        """Where this process binds. Unique per process start, so that no stale peer ever talks to a new process."""
        links = self.config.links
        if links.transport == "tcp":
            return f"tcp://{links.host}:0"
        return f"ipc://{self.config.run_dir}/{self.service}-{self.instance}.{self.incarnation & 0xFFFFFFFF:08x}"

    def peer(self, endpoint: str) -> Peer:
        return Peer(self.service, self.instance, self.incarnation, endpoint, os.getpid(), self.since_s)

    def push(self, endpoint: str) -> Push:
        return Push(endpoint, self.incarnation, self.config.links.queue, self.counters)

    def usage(self) -> dict[str, float]:
        """Metrics that every process has. Without a descriptor to read them they are those of the last time."""
        with contextlib.suppress(OSError):
            cpu = self._usage.cpu_times()
            resident = float(self._usage.memory_info().rss)
            self._used = {"resident_bytes": resident, "cpu_seconds": cpu.user + cpu.system}
        return link_metrics(self.counters) | self._used


def scheduler_endpoint(config: Config) -> str:
    """The one well-known address."""
    if config.links.transport == "tcp":
        return f"tcp://{config.links.host}:{config.links.scheduler_port}"
    return f"ipc://{config.run_dir}/scheduler"


class Node(Generic[T]):
    """Keeps an asyncio process (API, tokenizer) a member and connected.

    The owner sets `state`, `progress` and `stage`, reads `view` and sends with `send` / `to_scheduler`.
    """

    def __init__(
        self,
        process: Process,
        union: Any,
        handler: Callable[[list[tuple[int, T]]], None],
        on_change: Callable[[Change], None],
        metrics: Callable[[], dict[str, float]],
    ) -> None:
        self.process = process
        self.view = Membership(process.incarnation, process.config.links.dead_after_s)
        self.state: State = "starting"
        self.progress = 0
        self.stage: Progress | None = None
        self._handler, self._on_change, self._metrics = handler, on_change, metrics
        links = process.config.links
        self.inbox: AsyncInbox[T] = AsyncInbox(process.inbox_endpoint(), union, links.queue, process.counters)
        self.to_scheduler = process.push(scheduler_endpoint(process.config))
        self._links: dict[int, Push] = {}  # by the peer's incarnation
        self._hello = Hello(process.peer(self.inbox.endpoint), configuration.fingerprint(process.config))

    def send(self, incarnation: int, message: msgspec.Struct) -> bool:
        """To one peer; False if it is not a member or its link is full."""
        link = self._links.get(incarnation)
        return link is not None and link.send(message)

    @property
    def joined(self) -> bool:
        """Listed by a scheduler that still speaks. A restarted one learns of us only by a new Hello."""
        silent = self.view.silent(time.monotonic(), self.process.config.links.heartbeat_s)
        return not silent and self.process.incarnation in self.view.members

    def beat(self) -> None:
        """One heartbeat, with a Hello before it while the scheduler does not list us."""
        if not self.joined:
            self.to_scheduler.send(self._hello)
        values = checked(self._metrics() | self.process.usage())
        self.to_scheduler.send(Heartbeat(self.state, self.progress, self.stage, values))

    async def run(self) -> None:
        """Receives and beats until cancelled."""
        self.inbox.start(self._receive)
        while True:
            self.beat()
            await asyncio.sleep(self.process.config.links.heartbeat_s if self.joined else 0.05)

    def leave(self) -> None:
        """Says Goodbye and closes every link."""
        self.to_scheduler.send(Goodbye())
        self.to_scheduler.close(linger_ms=200)
        for link in self._links.values():
            link.close(linger_ms=200)
        self._links.clear()
        self.inbox.close()

    def _receive(self, batch: list[tuple[int, Any]]) -> None:
        others = []
        for received in batch:
            if type(received[1]) is Members:
                self._apply(received[0], received[1])
            else:
                others.append(received)
        if others:
            self._handler(others)

    def _apply(self, sender: int, message: Members) -> None:
        change = self.view.update(sender, message, time.monotonic())
        self.inbox.departed = self.view.departed
        if self.process.incarnation in self.view.departed:
            raise RuntimeError("the scheduler has given this process up; ending, to start afresh")
        if change.new_scheduler and not self.joined:
            self.beat()
        for peer in change.left:
            if link := self._links.pop(peer.incarnation, None):
                link.close()
        for peer in change.joined:
            if peer.incarnation != self.process.incarnation:
                self._links[peer.incarnation] = self.process.push(peer.endpoint)
        self._on_change(change)


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
    for context in fault:
        logging.getLogger(service).critical(
            "fault: %s", context.get("message"), exc_info=context.get("exception") or None
        )
    sys.exit(1 if fault else 0)


def start(service: ServiceName) -> Process:
    """Command line, settings, logs and run directory of a service process. Exits with EXIT_CONFIG on bad settings."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}")
    parser.add_argument("--instance", type=int, default=0, help="number of this replica")
    parser.add_argument("--config", default=env.config_path(), help="TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="one setting")
    arguments = parser.parse_args()
    try:
        env.check()
        config = configuration.load(arguments.config, env.settings() + arguments.set)
        make_run_dir(config.run_dir)
    except ConfigError as error:
        end_on_config(error)
    log.set_up(f"{service}-{arguments.instance}", config.log.level, config.log.format)
    return Process(service, arguments.instance, config)


def end_on_config(error: ConfigError) -> NoReturn:
    """Tells the person what is wrong and ends with the status that a supervisor does not answer by a restart."""
    print(f"configuration: {error}", file=sys.stderr)
    sys.exit(EXIT_CONFIG)


def make_run_dir(path: Path) -> None:
    """Creates the run directory for this user only. Raises ConfigError if it belongs to somebody else."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"cannot use the run directory {path}: {error.strerror}") from error
    if len(str(path)) > 80:
        raise ConfigError(f"the run directory {path} is too long for a socket path; set links.run_dir")
