"""A tcp link with keys, and everybody who has none: nothing reaches the inbox, nothing is left behind, others go on."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from common import curve, transport
from common.config import Links
from common.errors import ConfigError
from common.protocol import PROTOCOL_VERSION, Abort, ToScheduler
from common.transport import HEADER, MAGIC, SECURITY, Inbox, LinkCounters, Push, secure
from tests.security.wire import GREETING, Relay, connect, until_closed
from valence import link_keys

FRAME = HEADER.pack(MAGIC, PROTOCOL_VERSION, 9) + b"\x92\xa5Abort\x01"
LIMIT_S = 240


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Keys of a deployment, which this process has taken."""
    link_keys.init(tmp_path / "keys", "here")
    secure(Links(transport="tcp", keys_dir=str(tmp_path / "keys")))
    yield tmp_path / "keys"
    secure(Links())


@pytest.fixture
def inbox(folder: Path) -> Iterator[Inbox]:
    inbox = Inbox("tcp://127.0.0.1:0", ToScheduler, 1000, LinkCounters())
    yield inbox
    inbox.close()


def good(inbox: Inbox, number: int) -> None:
    """A peer with keys gets a message through, and it is the only one that comes."""
    push = Push(inbox.endpoint, 7, 100, LinkCounters())
    assert push.send(Abort(number))
    assert inbox.wait(LIMIT_S)
    assert inbox.drain() == [(7, Abort(number))]
    push.close()


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@contextlib.contextmanager
def stranger(endpoint: str, *options: tuple[int, bytes | int]) -> Iterator[list[int]]:
    """A ZeroMQ peer of an attacker's own; yields the events of its connection. It has sent a valid frame."""
    sock = zmq.Context.instance().socket(zmq.PUSH)
    for option, value in options:
        sock.set(option, value)
    monitor = sock.get_monitor_socket()
    sock.connect(endpoint)
    sock.send(FRAME, zmq.DONTWAIT)
    events: list[int] = []

    def look() -> bool:
        while monitor.poll(0):
            events.append(recv_monitor_message(monitor)["event"])
        failed = {zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL}
        return bool(failed.intersection(events)) or zmq.EVENT_DISCONNECTED in events

    until(look)
    try:
        yield events
    finally:
        sock.disable_monitor()
        monitor.close()
        sock.close(linger=0)


def keys_of(pair: curve.KeyPair, server: bytes) -> list[tuple[int, bytes]]:
    return [
        (zmq.CURVE_SERVERKEY, server),
        (zmq.CURVE_PUBLICKEY, pair.public_bytes),
        (zmq.CURVE_SECRETKEY, pair.secret_bytes),
    ]


def test_both_ends_know_each_other(inbox: Inbox) -> None:
    good(inbox, 1)
    assert SECURITY.gatekeeper is not None and SECURITY.gatekeeper.is_alive()


def test_without_keys(inbox: Inbox) -> None:
    with stranger(inbox.endpoint) as events:
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
        good(inbox, 1)
    assert inbox.counters.received == 1


def test_with_another_servers_key(inbox: Inbox) -> None:
    """The attacker has keys, but not of this deployment."""
    theirs = link_keys.make_pair()
    with stranger(inbox.endpoint, *keys_of(theirs, theirs.public_bytes)) as events:
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
        good(inbox, 1)
    assert inbox.counters.received == 1


def test_with_a_client_key_that_is_not_allowed(folder: Path, inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    """The attacker even knows the server's public key."""
    theirs = link_keys.make_pair()
    server = curve.read(folder).server.public_bytes
    with stranger(inbox.endpoint, *keys_of(theirs, server)) as events:
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
        good(inbox, 1)
    assert inbox.counters.received == 1
    told = [record.getMessage() for record in caplog.records if curve.fingerprint(theirs.public) in record.getMessage()]
    assert len(told) == 1


def test_a_plain_text_peer_is_no_downgrade(inbox: Inbox) -> None:
    options = [(zmq.PLAIN_USERNAME, b"admin"), (zmq.PLAIN_PASSWORD, b"admin")]
    with stranger(inbox.endpoint, *options) as events:
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
    good(inbox, 1)


def test_a_host_is_added_and_taken_back_without_a_restart(folder: Path, inbox: Inbox, tmp_path: Path) -> None:
    link_keys.add(folder, "other", tmp_path / "other")
    theirs = curve.read(tmp_path / "other")
    sock = zmq.Context.instance().socket(zmq.PUSH)
    for option, value in keys_of(theirs.client, theirs.server.public_bytes):
        sock.set(option, value)
    sock.connect(inbox.endpoint)
    sock.send(FRAME)
    assert inbox.wait(LIMIT_S)
    assert inbox.drain() == [(9, Abort(1))]
    sock.close(linger=0)
    link_keys.remove(folder, "other")
    with stranger(inbox.endpoint, *keys_of(theirs.client, theirs.server.public_bytes)) as events:
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
    good(inbox, 2)


def test_a_client_that_is_allowed_a_moment_later_gets_in(folder: Path, inbox: Inbox) -> None:
    """It tries again by itself: a refusal is not for ever."""
    theirs = link_keys.make_pair()
    with stranger(inbox.endpoint, *keys_of(theirs, curve.read(folder).server.public_bytes)):
        clients = [*curve.read_clients(folder), curve.Client("late", theirs.public)]
        (folder / curve.CLIENTS).write_bytes(curve.write_clients(clients))
        assert inbox.wait(LIMIT_S)
        assert inbox.drain() == [(9, Abort(1))]


def test_a_recorded_connection_cannot_be_played_again(inbox: Inbox) -> None:
    relay = Relay(inbox.endpoint)
    push = Push(relay.endpoint, 7, 100, LinkCounters())
    push.send(Abort(1))
    assert inbox.wait(LIMIT_S)
    assert inbox.drain() == [(7, Abort(1))]
    until(lambda: len(relay.messages()) == 1)
    with connect(inbox.endpoint) as sock:
        sock.sendall(bytes(relay.recorded))
        until_closed(sock)
    push.close()
    relay.close()
    good(inbox, 2)
    assert inbox.counters.received == 2


def test_a_frame_said_twice_in_its_own_connection_counts_once(inbox: Inbox) -> None:
    relay = Relay(inbox.endpoint)
    push = Push(relay.endpoint, 7, 100, LinkCounters())
    push.send(Abort(1))
    assert inbox.wait(LIMIT_S)
    until(lambda: len(relay.messages()) == 1)
    relay.repeat(relay.messages()[0])
    found = []

    def second() -> bool:
        """It comes by a new connection: the old one was cut."""
        push.send(Abort(2))
        inbox.wait(0.1)
        found.extend(inbox.drain())
        return (7, Abort(2)) in found

    until(second)
    assert found.count((7, Abort(1))) == 1
    push.close()
    relay.close()


def test_the_wire_shows_no_message(inbox: Inbox) -> None:
    relay = Relay(inbox.endpoint)
    push = Push(relay.endpoint, 7, 100, LinkCounters())
    push.send(Abort(0x5EC12E7))
    assert inbox.wait(LIMIT_S)
    until(lambda: len(relay.messages()) == 1)
    assert b"Abort" not in relay.recorded
    assert MAGIC not in relay.messages()[0][:2]
    push.close()
    relay.close()


GARBAGE = [
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    b"\xff" * 5000,
    GREETING[:30],
    GREETING,
    GREETING + b"\x04\xff",
    GREETING + b"\x06" + b"\xff" * 8,
    GREETING + b"\x06" + (1 << 62).to_bytes(8, "big") + b"x" * 5000,
    GREETING + b"\x04\x06\x05HELLO",
    GREETING + b"\x04\xc8\x05HELLO" + bytes(194),
    GREETING + b"\x04\x06\x05READY",
    GREETING.replace(b"CURVE", b"NULL\0") + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x04PUSH",
    b"\xff" + (len(FRAME) + 1).to_bytes(8, "big") + b"\x7f\x01\x08" + FRAME,  # ZMTP 2
    bytes([len(FRAME) + 1, 0]) + FRAME,  # ZMTP 1
    GREETING + b"\x00" + bytes([len(FRAME)]) + FRAME,
]


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_on_the_port(inbox: Inbox, content: bytes) -> None:
    for _ in range(5):
        with connect(inbox.endpoint) as sock, contextlib.suppress(OSError):
            sock.sendall(content)
            sock.shutdown(socket.SHUT_WR)
            until_closed(sock)
    good(inbox, 1)
    assert inbox.counters.received == 1


def test_who_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_MS", 200)
    inbox = Inbox("tcp://127.0.0.1:0", ToScheduler, 10, LinkCounters())
    for content in (b"", GREETING, GREETING + b"\x04\xc8\x05HEL"):
        with connect(inbox.endpoint) as sock:
            sock.sendall(content)
            until_closed(sock)  # fails by the socket's time-out if nobody cuts it
    good(inbox, 1)
    inbox.close()


def test_a_thousand_connections_leave_nothing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Half of them silent, half announcing frames of 250 MiB; a peer with keys goes on meanwhile."""
    monkeypatch.setattr(transport, "HANDSHAKE_MS", 5_000)
    inbox = Inbox("tcp://127.0.0.1:0", ToScheduler, 10, LinkCounters())
    good(inbox, 1)
    own = psutil.Process()
    descriptors, resident = own.num_fds(), own.memory_info().rss
    greedy = GREETING + b"\x06" + (250 << 20).to_bytes(8, "big") + b"x" * 100
    for _ in range(4):
        with contextlib.ExitStack() as stack:
            for number in range(250):
                sock = stack.enter_context(connect(inbox.endpoint))
                with contextlib.suppress(ConnectionError):
                    sock.sendall(b"" if number % 2 else greedy)
            good(inbox, 2)
    until(lambda: own.num_fds() <= descriptors + 5)
    assert own.memory_info().rss - resident < 64 << 20
    assert inbox.counters.received == 5
    good(inbox, 3)
    inbox.close()


def test_tcp_beyond_this_host_needs_keys_or_a_word(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("0.0.0.0", "10.0.0.1", "127.0.0.1.example.org", "127.evil", "::"):
        with pytest.raises(ConfigError, match="insecure_tcp"):
            secure(Links(transport="tcp", host=host))
    for host in ("127.0.0.1", "127.8.8.8", "localhost", "[::1]"):
        secure(Links(transport="tcp", host=host))
    assert caplog.records == []
    secure(Links(transport="tcp", host="10.0.0.1", insecure_tcp=True))
    assert "insecure_tcp" in caplog.text
    secure(Links())


def test_an_address_that_a_peer_names_harms_nobody(folder: Path) -> None:
    """Neither one that is none, nor, without keys, one on another host."""
    for endpoint in ("tcp://127.0.0.1:notaport", "ipc://" + "x" * 500, "tcp://\0:1", "inproc://x"):
        push = Push(endpoint, 1, 10, LinkCounters())
        assert not push.send(Abort(1))
        push.close()
    secure(Links(transport="tcp"))
    push = Push("tcp://192.0.2.1:5", 1, 10, LinkCounters())
    assert not push.send(Abort(1))
    push.close()


def test_secrets_show_in_no_repr(folder: Path) -> None:
    keys = curve.read(folder)
    text = repr(keys) + str(keys.server)
    for secret in (keys.server.secret, keys.client.secret):
        assert secret not in text
        assert z85.encode(bytes.fromhex(secret)).decode() not in text
