"""Exit statuses of real processes, and a Node against a scheduler played by the test over real sockets."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from common.config import Config, load
from common.errors import ConfigError
from common.lifecycle import Node, Process, make_run_dir, number_of
from common.membership import Change
from common.protocol import Abort, Goodbye, Heartbeat, Hello, Load, Member, Members, Peer, ToApi, ToScheduler
from common.transport import AsyncInbox, LinkCounters, Push, scheduler_endpoint

SCRIPT = """
import asyncio, sys
from common.errors import ConfigError
from common.lifecycle import main

async def serve(process):
    print("started", flush=True)
    {body}

main("api", serve)
"""


def start(tmp_path: Path, body: str) -> subprocess.Popen:
    script = SCRIPT.format(body=body)
    command = [sys.executable, "-c", script, f"--set=links.run_dir={tmp_path}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    return process


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("return", 0, ""),
        ("raise ValueError('broken')", 1, "ValueError"),
        ("raise ConfigError('port taken')", 78, "configuration: port taken"),
        ("asyncio.get_running_loop().call_soon(lambda: 1 / 0); await asyncio.sleep(60)", 1, "ZeroDivisionError"),
    ],
)
def test_how_a_service_ends_is_its_exit_status(tmp_path: Path, body: str, status: int, words: str) -> None:
    process = start(tmp_path, body)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == status
    assert words in errors


def test_replicas_of_one_command_line_number_themselves(tmp_path: Path) -> None:
    config = load(None, [f"links.run_dir={tmp_path}"])
    assert [number_of("auto", "api", config) for _ in range(2)] == [0, 1]
    assert number_of("auto", "worker", config) == 0
    assert number_of("7", "worker", config) == 7
    for text in ("-1", "x", ""):
        with pytest.raises(ConfigError, match=f"--instance is a number or auto, not {text!r}"):
            number_of(text, "worker", config)


def test_a_process_without_descriptors_beats_on_with_its_last_figures(tmp_path: Path) -> None:
    """The figures are read from files; a heartbeat that failed for want of one would end every service."""
    process = Process("api", 0, load(None, [f"links.run_dir={tmp_path}"]))
    before = process.usage()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.enter_context(open(os.devnull))
            assert process.usage() == before
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.usage()["cpu_seconds"] >= before["cpu_seconds"] > 0


def test_one_signal_asks_and_a_second_ends(tmp_path: Path) -> None:
    process = start(tmp_path, "await process.stopping.wait(); print('stopping', flush=True); await asyncio.sleep(60)")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == 1


def test_the_run_directory_is_private(tmp_path: Path) -> None:
    make_run_dir(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run directory"):
        make_run_dir(tmp_path / "file")
    with pytest.raises(ConfigError, match="too long"):
        make_run_dir(tmp_path / ("x" * 100))


class System:
    """A Node and the scheduler it talks to, on one loop."""

    def __init__(self, config: Config) -> None:
        self.process = Process("api", 0, config)
        self.left = False
        self.handled: list = []
        self.changes: list[Change] = []
        self.node: Node = Node(self.process, ToApi, self.handled.extend, self.changes.append, lambda: {"requests": 2.0})
        self.heard: list = []
        self.inbox: AsyncInbox = AsyncInbox(scheduler_endpoint(config), ToScheduler, 100, LinkCounters())
        self.inbox.start(lambda batch: self.heard.extend(message for _, message in batch))
        self.push = Push(self.node.inbox.endpoint, 1, 100, LinkCounters())
        self.task = asyncio.ensure_future(self.node.run())

    def members(self, *peers: Peer, departed: tuple[int, ...] = ()) -> Members:
        everybody = (Peer("scheduler", 0, 1, "ipc:///scheduler"), *peers)
        return Members([Member(peer, "ready") for peer in everybody], list(departed), Load())

    def own(self) -> Peer:
        return self.process.peer(self.node.inbox.endpoint)

    async def until(self, condition) -> None:
        async with asyncio.timeout(240):
            while not condition():
                await asyncio.sleep(0.005)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if not self.left:
            self.node.leave()
        self.push.close()
        self.inbox.close()


def run(tmp_path: Path, scenario, *settings: str) -> None:
    async def whole() -> None:
        system = System(load(None, [f"links.run_dir={tmp_path}", "links.heartbeat_s=0.02", *settings]))
        try:
            await scenario(system)
        finally:
            await system.end()

    asyncio.run(whole())


def test_a_node_says_hello_until_it_is_listed_then_beats(tmp_path: Path) -> None:
    async def scenario(system: System) -> None:
        await system.until(lambda: sum(isinstance(m, Hello) for m in system.heard) >= 2)
        system.push.send(system.members(system.own()))
        await system.until(lambda: system.node.joined)
        system.heard.clear()

        def three_beats() -> bool:
            system.push.send(system.members(system.own()))  # a scheduler that lives repeats its members
            return sum(isinstance(m, Heartbeat) for m in system.heard) >= 3

        await system.until(three_beats)
        assert not any(isinstance(m, Hello) for m in system.heard)
        assert system.heard[0].counters["requests"] == 2
        assert system.heard[0].counters["resident_bytes"] > 1e6
        # One that falls silent may have been restarted, without knowing us or where we are.
        await system.until(lambda: any(isinstance(m, Hello) for m in system.heard))
        # A scheduler that does not know us gets a Hello at once.
        system.heard.clear()
        successor = Push(system.node.inbox.endpoint, 2, 100, LinkCounters())
        successor.send(system.members())
        await system.until(lambda: any(isinstance(m, Hello) for m in system.heard))
        successor.close()

    run(tmp_path, scenario, "links.heartbeat_s=0.5")  # it must not be late by 2.5 of them


def test_links_to_peers_follow_the_members(tmp_path: Path) -> None:
    async def scenario(system: System) -> None:
        other: AsyncInbox = AsyncInbox(f"ipc://{tmp_path}/other", ToScheduler, 100, LinkCounters())
        received: list = []
        other.start(received.extend)
        peer = Peer("tokenizer", 0, 55, other.endpoint)
        assert not system.node.send(55, Abort(1))
        system.push.send(system.members(system.own(), peer))
        await system.until(lambda: system.changes)
        assert peer in system.changes[0].joined
        assert system.node.send(55, Abort(1))
        await system.until(lambda: received)
        assert received == [(system.process.incarnation, Abort(1))]
        system.push.send(system.members(system.own(), departed=(55,)))
        await system.until(lambda: len(system.changes) == 2)
        assert system.changes[1].left == [peer]
        assert not system.node.send(55, Abort(2))
        assert system.node.inbox.departed == {55}
        other.close()

    run(tmp_path, scenario)


def test_leaving_says_goodbye(tmp_path: Path) -> None:
    async def scenario(system: System) -> None:
        system.push.send(system.members(system.own()))
        await system.until(lambda: system.node.joined)
        system.task.cancel()
        system.node.leave()
        system.left = True
        await system.until(lambda: any(isinstance(m, Goodbye) for m in system.heard))

    run(tmp_path, scenario)


def test_a_node_that_was_given_up_faults(tmp_path: Path) -> None:
    async def scenario(system: System) -> None:
        faults: list = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
        system.push.send(system.members(departed=(system.process.incarnation,)))
        await system.until(lambda: faults)
        assert "given this process up" in str(faults[0])

    run(tmp_path, scenario)


def test_every_scheduler_has_an_address_of_its_own(tmp_path: Path) -> None:
    local = load(None, [f"links.run_dir={tmp_path}"])
    assert [scheduler_endpoint(local, i) for i in (0, 1)] == [
        f"ipc://{tmp_path}/scheduler",
        f"ipc://{tmp_path}/scheduler-1",
    ]
    remote = load(None, ["links.transport=tcp", "links.scheduler_port=65530"])
    assert scheduler_endpoint(remote, 5) == "tcp://127.0.0.1:65535"
    with pytest.raises(ConfigError, match="no port for scheduler 6"):
        scheduler_endpoint(remote, 6)


class Second:
    """Scheduler 1, incarnation `number`, which may come and go."""

    def __init__(self, system: System, number: int) -> None:
        self.heard: list = []
        endpoint = scheduler_endpoint(system.process.config, 1)
        self.peer = Peer("scheduler", 1, number, endpoint)
        self.inbox: AsyncInbox = AsyncInbox(endpoint, ToScheduler, 1000, LinkCounters())
        self.inbox.start(lambda batch: self.heard.extend(message for _, message in batch))
        self.push = Push(system.node.inbox.endpoint, number, 100, LinkCounters())

    def tell(self, *peers: Peer, schedulers: int = 0) -> None:
        members = [Member(peer, "ready") for peer in (self.peer, *peers)]
        self.push.send(Members(members, [], Load(), schedulers=schedulers))

    def saw(self, kind: type) -> bool:
        return any(isinstance(message, kind) for message in self.heard)

    def close(self) -> None:
        self.inbox.close()
        self.push.close()


def test_a_node_joins_every_scheduler_and_outlives_each(tmp_path: Path) -> None:
    async def scenario(system: System) -> None:
        node = system.node
        assert node.schedulers == [0]
        system.push.send(msgspec.structs.replace(system.members(system.own()), schedulers=2))
        await system.until(lambda: node.joined and node.schedulers == [0, 1])
        second = Second(system, 21)
        await system.until(lambda: second.saw(Hello))
        second.tell(system.own())
        await system.until(lambda: second.saw(Heartbeat) and len(node.view.views) == 2)
        assert node.tell(1, Abort(1)) and node.tell_all(Abort(2)) and not node.tell(2, Abort(3))
        await system.until(lambda: Abort(2) in second.heard and Abort(2) in system.heard)
        assert Abort(1) in second.heard and Abort(1) not in system.heard
        second.close()
        successor = Second(system, 22)
        await system.until(lambda: successor.saw(Hello))
        successor.tell()
        await system.until(lambda: node.view.instance_of(22) == 1)
        assert not system.changes[-1].left or system.changes[-1].left[0].incarnation == 21
        await system.until(lambda: successor.saw(Heartbeat))
        successor.close()

    run(tmp_path, scenario)


def test_links_follow_the_number_of_schedulers(tmp_path: Path) -> None:
    async def scenario(system: System) -> None:
        second = Second(system, 21)
        second.tell(system.own(), schedulers=2)
        await system.until(lambda: system.node.schedulers == [0, 1])
        second.close()
        one = msgspec.structs.replace(system.members(system.own()), schedulers=1)

        def gone() -> bool:
            system.push.send(one)
            return system.node.schedulers == [0]

        await system.until(gone)
        assert [peer.incarnation for change in system.changes for peer in change.left] == [21]

    run(tmp_path, scenario, "links.dead_after_s=0.2")


def test_one_scheduler_cannot_end_us_while_another_keeps_us(tmp_path: Path) -> None:
    async def scenario(system: System) -> None:
        faults: list = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        second = Second(system, 21)
        second.tell(system.own())
        await system.until(lambda: 1 in system.node.view.views)
        system.push.send(system.members(departed=(system.process.incarnation,)))
        await system.until(lambda: len(system.changes) == 2)
        assert not faults and system.node.view.lists_us(1) and not system.node.view.lists_us(0)
        second.close()

    run(tmp_path, scenario)
