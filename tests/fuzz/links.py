"""Every inbox of a real system gets frames that no well-meaning peer sends, while clients use it.

Three kinds: frames recorded from a real run (frames.json, by tap.py) with changed bytes, messages with any values that
their types allow, and msgpack bombs; each from senders that nobody knows, that have joined as peers of no use, or,
where the receiver does not trust its sender by design (`TRUSTED`), under the name of a real one.
"""

import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from random import Random
from threading import Event, Thread
from typing import Any

import httpx
import msgspec
import zmq

from common.columns import pack_i32, pack_u64
from common.membership import by_scheduler
from common.protocol import (
    PROTOCOL_VERSION,
    Admit,
    Detokenize,
    Goodbye,
    Heartbeat,
    Hello,
    Member,
    Members,
    Peer,
    PromptKind,
    ServiceName,
    StatusQuery,
    StepPlan,
    StepResult,
    Submit,
    ToApi,
    TokenBatch,
    Tokenize,
    ToScheduler,
    ToTokenizer,
    ToWorker,
    WorkerReady,
    make_seq_id,
)
from common.transport import HEADER, MAGIC
from tests.fuzz import mutate
from tests.fuzz.processes import LIMIT_S, SERVICES, Processes, running
from tests.fuzz.tap import FRAMES

UNIONS: dict[str, Any] = {"api": ToApi, "tokenizer": ToTokenizer, "scheduler": ToScheduler, "worker": ToWorker}
# Receiver and message: whose word on them is taken as it is.
TRUSTED: dict[tuple[str, type], tuple[str, ...]] = {
    ("worker", StepPlan): ("scheduler",),
    ("tokenizer", TokenBatch): ("scheduler",),
    ("scheduler", StepResult): ("worker",),
    ("scheduler", WorkerReady): ("worker",),
    ("scheduler", Goodbye): SERVICES,
    ("scheduler", Heartbeat): SERVICES,
    ("scheduler", Hello): SERVICES,
}
ROUND = 250  # frames between two looks at the system
GROWTH_BYTES = 150 << 20
STRANGERS = 6
CHOICES = 128  # more than the choices of a request


class Outside:
    """Sockets to every inbox, and the names under which frames are sent."""

    def __init__(self, random: Random, members: dict[str, Member]) -> None:
        self.random = random
        self.members = members
        self.folder = members["api"].peer.endpoint.rpartition("/")[0]
        self.incarnations = {name: member.peer.incarnation for name, member in members.items()}
        self.strangers = [random.getrandbits(63) | 1 for _ in range(STRANGERS)]
        self.seeds = [(receiver, bytes.fromhex(frame)) for receiver, _, frame in json.loads(FRAMES.read_text())]
        self.decoders = {name: msgspec.msgpack.Decoder(union) for name, union in UNIONS.items()}
        self.kinds = {name: union.__args__ for name, union in UNIONS.items()}
        self.sockets = {}
        for name, member in members.items():
            socket = self.sockets[name] = zmq.Context.instance().socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDTIMEO, 60_000)
            socket.connect(member.peer.endpoint)
        self.counter = itertools.count(1)
        self.recent: deque[int] = deque(maxlen=30)
        self.join()

    def join(self) -> None:
        """Some strangers become members, of services and instances that nobody else has."""
        for place, stranger in enumerate(self.strangers[1:]):
            service = ("api", "tokenizer", "worker")[place % 3]
            peer = Peer(service, 100 + place, stranger, f"{self.folder}/nobody-{place}")  # type: ignore[arg-type]
            self.sockets["scheduler"].send(frame_of(stranger, Hello(peer, "other")))

    def next(self, receiver: str) -> bytes:
        """A frame that the receiver has to survive."""
        while True:
            frame = self._any(receiver)
            if not self._by_design(receiver, frame):
                return frame

    def _any(self, receiver: str) -> bytes:
        random = self.random
        match random.randrange(10):
            case 0:
                return self._header() + random.choice(mutate.BOMBS)
            case 1:
                return mutate.frame(random, b"VL\1\0" + random.randbytes(random.randrange(40)))
            case 2 | 3:
                known = [frame for name, frame in self.seeds if name == receiver]
                return mutate.frame(random, self._header() + random.choice(known)[HEADER.size :])
            case 4:
                frame = random.choice(self.seeds)[1]  # often a message of another union
                return self._header() + frame[HEADER.size :]
            case 5:
                good = msgspec.msgpack.decode(random.choice(self.seeds)[1][HEADER.size :])
                return self._header() + encoded(mutate.tree(random, good))
        kind = random.choice(self.kinds[receiver])
        header = self._header()
        return header + encoded(mutate.message(random, kind, self._special(kind, HEADER.unpack_from(header)[2])))

    def _special(self, kind: type, sender: int) -> mutate.Special:
        """Values that a receiver has reasons to believe: the sender's own requests, and endpoints that are allowed."""
        random = self.random
        route = make_seq_id(100 + 3 * random.randrange(2), random.choice((0, 0, 101)), sender & 0xFFFF, 0)

        def new() -> int:
            """Ids are never used twice: who does so may lose its own request."""
            self.recent.append(route + CHOICES * next(self.counter))
            return self.recent[-1]

        def own() -> int:
            return random.choice(self.recent) + random.choice((0, 0, 1)) if self.recent else 0

        def endpoint() -> str:
            return self.folder + random.choice(("/nobody", "/\0", "/" + "x" * 300, "/ü", f"/{random.getrandbits(32)}"))

        return {
            "seq_id": new if kind in (Submit, Admit) else own,
            "call_id": new if kind in (Tokenize, Detokenize) else own,
            "origin": lambda: random.choice((-1, -1, route + random.getrandbits(31))),
            "seq_ids": lambda: pack_u64([own()]),
            "first_index": lambda: pack_i32([random.choice((0, 0, 1, -1, 2**31 - 1))]),
            "counts": lambda: pack_i32([random.choice((1, 1, 0, -1, 2**31 - 1))]),
            "tokens": lambda: pack_i32([random.choice((1, 400, 10**6, -1))]),
            "texts": lambda: [random.choice(mutate.TEXTS)],
            "n": lambda: random.choice((1, 1, 2, 100, 0, -1)),
            "max_tokens": lambda: random.choice((0, 1, 5, 2**40, -1)),
            "kind": lambda: random.choice((PromptKind.TEXT, PromptKind.TOKENS, PromptKind.CHAT)),
            "messages": lambda: random.choice(
                (b"[]", b'[{"role":"user"}]', b"[" * 9999, b'[{"content":[1]}]', b"\xff")
            ),
            "endpoint": endpoint,
            "reply_to": endpoint,
            "counters": lambda: {"requests": random.choice(mutate.REALS), "no such": 1.0},
        }

    def _header(self) -> bytes:
        random = self.random
        sender = random.choice((*self.strangers, *self.incarnations.values(), 0, 2**64 - 1))
        version = PROTOCOL_VERSION if random.random() < 0.97 else random.choice((0, 2, 65535))
        return HEADER.pack(MAGIC, version, sender)

    def _by_design(self, receiver: str, frame: bytes) -> bool:
        """Whether a valid frame is by one whose word is taken, or takes the place of a real member or scheduler."""
        if len(frame) <= HEADER.size:
            return False
        sender = HEADER.unpack_from(frame)[2]
        try:
            message = self.decoders[receiver].decode(frame[HEADER.size :])
        except (msgspec.DecodeError, RecursionError, ValueError):
            return False
        if isinstance(message, Hello):
            peer = message.peer
            return any(
                (peer.service, peer.instance) == (m.peer.service, m.peer.instance) for m in self.members.values()
            )
        if isinstance(message, Members) and by_scheduler(sender, message):
            return True
        trusted = TRUSTED.get((receiver, type(message)), ())
        return sender in [self.incarnations[name] for name in trusted]

    def close(self) -> None:
        for socket in self.sockets.values():
            socket.close(linger=0)


def encoded(message: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(message)
    except (OverflowError, UnicodeEncodeError):
        return b""  # no sender can say this


def frame_of(sender: int, message: msgspec.Struct) -> bytes:
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, sender) + msgspec.msgpack.encode(message)


class Clients:
    """Completions one after the other, each of which must come out right, while the system is bombarded."""

    def __init__(self, system: Processes) -> None:
        self.done = 0
        self.fault: BaseException | None = None
        self._system, self._stop = system, Event()
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with httpx.Client(timeout=LIMIT_S) as client:
                while not self._stop.is_set():
                    self._system.complete(client, 5 + self.done % 40)
                    self.done += 1
        except (AssertionError, httpx.HTTPError) as fault:
            self.fault = fault

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


def fuzz(budget: int, first: int, advance: Callable[[], None]) -> None:
    """`budget` frames to each of the four inboxes. Raises AssertionError with the frames before a fault."""
    random = Random(first)
    with running("worker.step_us=5000") as system:
        outside = Outside(random, system.members())
        clients = Clients(system)
        before: dict[str, int] = {}
        try:
            for begin in range(0, budget, ROUND):
                sent: list[tuple[str, bytes]] = []
                for _ in range(min(ROUND, budget - begin)):
                    for receiver in SERVICES:
                        frame = outside.next(receiver)
                        sent.append((receiver, frame))
                        outside.sockets[receiver].send(frame)
                    advance()
                _look(system, clients, sent)
                before = before or system.resident()
        finally:
            clients.end()
            outside.close()
        assert clients.done, "no client came through"
        system.wait_idle()
        with httpx.Client(timeout=LIMIT_S) as client:
            system.complete(client, 100)
        for name, size in system.resident().items():
            assert size < before[name] + GROWTH_BYTES, f"{name} has grown from {before[name]} to {size} bytes"


def flood(system: Processes, count: int) -> None:
    """More questions and Hellos, each for or by somebody else, than a process can have sockets."""
    members = system.members()
    folder = members["api"].peer.endpoint.rpartition("/")[0]
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(members["scheduler"].peer.endpoint)
    for place in range(count):
        socket.send(frame_of(77, StatusQuery(f"{folder}/nobody-{place}")))
    services: tuple[ServiceName, ...] = ("api", "tokenizer", "worker", "admin")
    for place in range(min(count, 900)):
        peer = Peer(services[place % 4], 20 + place // 4, 1000 + place, f"{folder}/stranger-{place}")
        socket.send(frame_of(1000 + place, Hello(peer, "other")))
    socket.close(linger=60_000)
    system.status()
    with httpx.Client(timeout=LIMIT_S) as client:
        system.complete(client, 10)
    system.check()


def _look(system: Processes, clients: Clients, sent: list[tuple[str, bytes]]) -> None:
    try:
        done = clients.done
        system.status()
        end_s = time.monotonic() + LIMIT_S
        while clients.done == done and clients.fault is None:
            system.check()
            assert time.monotonic() < end_s, "clients get no answers any more"
            time.sleep(0.01)
        system.check()
        if clients.fault is not None:
            raise clients.fault
    except (AssertionError, httpx.HTTPError) as error:
        frames = [f"{receiver} {frame[:200].hex()}" for receiver, frame in sent]
        error.add_note("the last frames:\n" + "\n".join(frames[-40:]))
        raise
