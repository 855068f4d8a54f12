import asyncio
import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from common.errors import ConfigError
from common.protocol import PROTOCOL_VERSION, Abort, StepPlan, StepResult, ToScheduler, ToWorker
from common.transport import HEADER, MAGIC, AsyncInbox, Inbox, LinkCounters, Push, is_loopback, new_incarnation

LIMIT_S = 240


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    inbox = Inbox(f"ipc://{tmp_path}/in", ToScheduler, 100, LinkCounters())
    yield inbox
    inbox.close()


@pytest.fixture
def push(inbox: Inbox) -> Iterator[Push]:
    push = Push(inbox.endpoint, 77, 100, LinkCounters())
    yield push
    push.close()


def raw(endpoint: str, *frames: bytes) -> None:
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(endpoint)
    for frame in frames:
        socket.send(frame)
    socket.close(linger=60_000)


def take(inbox: Inbox, count: int) -> list:
    """Drains until `count` frames were received in all, good or bad."""
    found = []
    while inbox.counters.received < count:
        assert inbox.wait(LIMIT_S)
        found += inbox.drain()
    return found


def test_messages_arrive_in_order_with_their_sender(inbox: Inbox, push: Push) -> None:
    for step in range(50):
        assert push.send(StepResult(step, b"1234"))
    assert take(inbox, 50) == [(77, StepResult(step, b"1234")) for step in range(50)]
    assert not inbox.wait(0)
    assert inbox.drain() == []


def test_a_shorter_message_after_a_longer_one_is_whole(inbox: Inbox, push: Push) -> None:
    push.send(StepResult(1, bytes(100_000)))
    push.send(Abort(2))
    assert take(inbox, 2) == [(77, StepResult(1, bytes(100_000))), (77, Abort(2))]


def test_drain_stops_at_its_limit(inbox: Inbox, push: Push) -> None:
    for number in range(10):
        push.send(Abort(number))
    inbox.wait(LIMIT_S)
    while inbox.counters.received < 10:
        assert len(inbox.drain(limit=3)) <= 3


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"garbage",
        b"\x00" * 1000,
        MAGIC,
        HEADER.pack(MAGIC, PROTOCOL_VERSION, 5),
        HEADER.pack(MAGIC, PROTOCOL_VERSION, 5) + b"\xc1",
        HEADER.pack(MAGIC, PROTOCOL_VERSION, 5) + b"\x92\xa5Abort\xa1x",
        HEADER.pack(MAGIC, PROTOCOL_VERSION, 5) + b"\x92\xa7Unknown\x01",
        HEADER.pack(MAGIC, PROTOCOL_VERSION, 5) + b"\x91" * 100_000,
        HEADER.pack(MAGIC, PROTOCOL_VERSION, 5) + b"\x92\xa5\xff\xff\xff\xff\xff\x01",
    ],
)
def test_garbage_is_counted_and_dropped(inbox: Inbox, push: Push, frame: bytes) -> None:
    raw(inbox.endpoint, frame)
    assert take(inbox, 1) == []
    assert inbox.counters.bad_frame == 1
    push.send(Abort(1))
    assert take(inbox, 2) == [(77, Abort(1))]


def test_messages_of_another_receiver_are_garbage(inbox: Inbox, push: Push) -> None:
    push.send(StepPlan(1))
    assert take(inbox, 1) == []
    assert inbox.counters.bad_frame == 1


def test_another_version_and_a_departed_sender_are_dropped(inbox: Inbox, push: Push) -> None:
    body = b"\x92\xa5Abort\x01"
    raw(inbox.endpoint, HEADER.pack(MAGIC, PROTOCOL_VERSION + 1, 77) + body)
    assert take(inbox, 1) == []
    inbox.departed = {77}
    push.send(Abort(1))
    assert take(inbox, 2) == []
    raw(inbox.endpoint, HEADER.pack(MAGIC, PROTOCOL_VERSION, 78) + body)
    assert take(inbox, 3) == [(78, Abort(1))]
    assert (inbox.counters.bad_version, inbox.counters.dead_sender, inbox.counters.bad_frame) == (1, 1, 0)


def test_a_full_link_refuses_and_counts(tmp_path: Path) -> None:
    counters = LinkCounters()
    push = Push(f"ipc://{tmp_path}/nobody", 1, 10, counters)
    assert [push.send(Abort(i)) for i in range(12)] == [True] * 10 + [False] * 2
    assert (counters.sent, counters.refused) == (10, 2)
    push.close()


@pytest.mark.parametrize("endpoint", ["../../etc/passwd", "ipc://" + "x" * 300, "tcp://127.0.0.1:x", "", "no://x"])
def test_an_address_that_is_none_gives_a_link_that_refuses(endpoint: str) -> None:
    push = Push(endpoint, 5, 10, LinkCounters())
    assert not push.send(Abort(1))
    push.close()


def test_a_link_waits_for_a_socket(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    counters = LinkCounters()
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Context, "socket", none_left)
        push = Push(inbox.endpoint, 77, 10, counters)
        assert not push.send(Abort(1))
        push.close()
    assert push.send(Abort(2)) and counters.refused == 1
    assert take(inbox, 1) == [(77, Abort(2))]
    push.close()


def test_a_link_without_descriptors_refuses_until_there_are_some(inbox: Inbox) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    counters = LinkCounters()
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    with contextlib.ExitStack() as held:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.enter_context(open(os.devnull))
            link = Push(inbox.endpoint, 7, 10, counters)
            assert not link.send(Abort(1))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert counters.refused == 1
    assert link.send(Abort(2))
    assert take(inbox, 1) == [(7, Abort(2))]
    link.close()


def test_the_socket_file_goes_with_the_inbox(tmp_path: Path) -> None:
    inbox = Inbox(f"ipc://{tmp_path}/in", ToWorker, 10, LinkCounters())
    assert (tmp_path / "in").exists()
    inbox.close()
    assert not (tmp_path / "in").exists()


def test_tcp_stays_on_this_host_without_keys() -> None:
    inbox = Inbox("tcp://127.0.0.1:0", ToScheduler, 10, LinkCounters())
    assert inbox.endpoint.startswith("tcp://127.0.0.1:")
    push = Push(inbox.endpoint, 3, 10, LinkCounters())
    push.send(Abort(9))
    assert take(inbox, 1) == [(3, Abort(9))]
    push.close()
    inbox.close()
    with pytest.raises(ConfigError, match="need keys"):
        Inbox("tcp://0.0.0.0:0", ToScheduler, 10, LinkCounters())
    assert not is_loopback("tcp://10.0.0.1:1")


def test_the_loop_hands_over_everything_that_arrived(tmp_path: Path) -> None:
    async def run() -> list[int]:
        inbox: AsyncInbox = AsyncInbox(f"ipc://{tmp_path}/in", ToScheduler, 10_000, LinkCounters())
        push = Push(inbox.endpoint, 5, 10_000, LinkCounters())
        found: list[int] = []
        complete = asyncio.Event()

        def handler(batch: list) -> None:
            found.extend(message.seq_id for _, message in batch)
            if len(found) < 3000:
                push.send(Abort(len(found) + 10_000))  # sending from the handler must not lose the edge
            elif not complete.is_set():
                complete.set()

        push.send(Abort(0))  # before the loop listens
        inbox.start(handler)
        for number in range(1, 2500):
            push.send(Abort(number))
            if number % 100 == 0:
                await asyncio.sleep(0)
        await asyncio.wait_for(complete.wait(), LIMIT_S)
        inbox.close()
        push.close()
        return found

    found = asyncio.run(run())
    assert [number for number in found if number < 10_000] == list(range(2500))


def test_incarnations_differ_and_are_never_zero() -> None:
    assert len({new_incarnation() for _ in range(1000)}) == 1000
    assert all(0 < new_incarnation() < 2**63 for _ in range(1000))
