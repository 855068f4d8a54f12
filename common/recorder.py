"""The flight recorder: the last events of one process, in a file of fixed size that outlives the process.

Owned by the process and written by its main thread. The file is mapped memory and its blocks are allocated at the
start, so what was noted is there after any end, also kill -9, and a disk that fills up later does not matter.
The process holds a lock on it while it lives, which says so across clocks, pids and containers.
Invariant: an event is numbers and a short text of our own making (a name, a request id, a reason); no prompt, output,
token id or key has a way in. `read` is for `valence story`; it trusts nothing in a file.
"""

import atexit
import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from typing import Literal

import msgspec

from common.locks import try_lock
from common.protocol import Peer

FOLDER = "record"  # in the run directory
MAGIC = b"VLREC001"
HEAD_BYTES = 4096
TEXT_BYTES = 64
# number, monotonic and wall time in seconds, kind, code, three numbers, text, number again: a torn slot has two.
BEAT = struct.Struct("<dd")  # at the end of the head: monotonic and wall time of the last heartbeat
SLOT = struct.Struct(f"<QddIIQQQ{TEXT_BYTES}sQ")
SLOT_BYTES = SLOT.size
ALL = (1 << 64) - 1
STALL_S = 2.0  # a heartbeat that is so late was held up
CLOCK_S = 0.5  # the wall clock has been set, or the machine slept, if it moved so far against the monotonic one

RingName = Literal["life", "requests", "refusals", "steps"]
# What happens often must not push out what happens rarely. Slots, powers of two.
RINGS: dict[RingName, int] = {"life": 512, "requests": 8192, "refusals": 512, "steps": 1024}
FILE_BYTES = HEAD_BYTES + SLOT_BYTES * sum(RINGS.values())


class Kind(IntEnum):
    """What happened; behind it what `seq`, `a`, `b`, `code` and the text mean, as far as they are used."""

    # life
    STARTED = 1  # a: pid, text: fingerprint of the settings
    STATE = 2  # text: the new state
    JOINED = 3  # a peer; seq: incarnation, a: pid, text: name
    LEFT = 4  # as JOINED; text: name and how
    READMITTED = 5  # a new scheduler has got all open requests; a: how many
    LINKS = 6  # since the heartbeat before; a: sends that a full link refused, b: frames that could not be read
    CLOCK = 7  # the wall clock moved; a: ms forward, b: ms back
    STALLED = 8  # no heartbeat; a: ms late
    SIGNAL = 9  # a: number
    FAULT = 10  # text: type of the exception
    ENDED = 11  # in order
    # requests; seq: the sequence
    RECEIVED = 20  # API; a: choices, b: age in us, text: request id
    FIRST_TEXT = 21  # API
    WAITING = 22  # API; its tokenizer has gone
    MOVED = 23  # API; seq: its new id, a: its first one
    ANSWERED = 24  # API; a: output tokens, b: cached tokens, code: FinishReason
    SUBMITTED = 30  # tokenizer; a: choices, b: the first id if it was another's before
    ENCODED = 31  # tokenizer; a: prompt tokens, b: choices
    ABORTED = 32  # tokenizer
    SEQUENCE = 40  # scheduler; text: what happened, code: FinishReason at the end
    ROW = 50  # worker; a: step, b: computed tokens, code: slot
    # refusals
    REFUSED = 60  # API: a: HTTP status, text: request id. Others: seq, text: reason
    # steps
    PLANNED = 70  # scheduler; a: step, b: rows, code: new rows
    STEP = 71  # worker, at its begin; a: step, b: us that the newest finished one took, code: rows


Record = Callable[..., None]  # Ring.add


def unrecorded(*_: object) -> None:
    """For what has no process around it."""


class Event(msgspec.Struct, frozen=True):
    """One slot, read."""

    number: int  # within its ring, from 1
    mono_s: float
    wall_s: float
    kind: Kind
    seq: int = 0
    a: int = 0
    b: int = 0
    code: int = 0
    text: str = ""


class Recording(msgspec.Struct):
    """A process's events, oldest first in each ring. `alive`: it ran when they were read."""

    peer: Peer
    rings: dict[RingName, list[Event]]
    beat: tuple[float, float] = (0.0, 0.0)  # monotonic and wall time of the last heartbeat; 0 before the first
    alive: bool = False

    @property
    def name(self) -> str:
        return f"{self.peer.service}-{self.peer.instance}"

    def newest(self, count: int) -> list[Event]:
        """The last events of all rings together, in order of time; steps are at most a quarter of them."""
        return newest(self.rings, count)

    @property
    def last_sign(self) -> tuple[float, float]:
        """Monotonic and wall time of the last event or heartbeat."""
        return max([self.beat, *((event.mono_s, event.wall_s) for event in self.newest(4))])


def newest(rings: dict[RingName, list[Event]], count: int) -> list[Event]:
    """See `Recording.newest`."""
    events = [event for name, ring in rings.items() for event in ring[-(count // 4 if name == "steps" else count) :]]
    return sorted(events, key=lambda event: event.mono_s)[-count:]


class Ring:
    """A part of the buffer; `add` is the hot path: about 0.4 us."""

    __slots__ = ("_buffer", "_mask", "_number", "_offset", "_pack")

    def __init__(self, buffer: "bytearray | mmap.mmap", offset: int, slots: int) -> None:
        self._buffer, self._offset, self._mask = buffer, offset, slots - 1
        self._number = 0
        self._pack = SLOT.pack_into

    def add(self, kind: Kind, seq: int = 0, a: int = 0, b: int = 0, code: int = 0, text: bytes = b"") -> None:
        """Overwrites the oldest event. Numbers that peers made up are cut to 64 bits, texts to TEXT_BYTES."""
        number = self._number = self._number + 1
        place = self._offset + (number & self._mask) * SLOT_BYTES
        mono_s, wall_s = time.monotonic(), time.time()
        try:
            self._pack(self._buffer, place, number, mono_s, wall_s, kind, code, seq, a, b, text, number)
        except struct.error:
            numbers = code & 0xFFFFFFFF, seq & ALL, a & ALL, b & ALL
            self._pack(self._buffer, place, number, mono_s, wall_s, kind, *numbers, text, number)


class Recorder:
    """In memory unless a mapped file is given; then it is the file's only writer."""

    def __init__(self, buffer: "mmap.mmap | None" = None) -> None:
        self._buffer: bytearray | mmap.mmap = bytearray(FILE_BYTES) if buffer is None else buffer
        self._state = ""
        self._links = (0, 0)
        self._beat_s = 0.0  # of the last heartbeat; 0 before the first
        self._offset_s = 0.0  # of the wall clock against the monotonic one, then
        self.on_fault: Callable[[BaseException], None] = lambda error: None
        rings, offset = [], HEAD_BYTES
        for slots in RINGS.values():
            rings.append(Ring(self._buffer, offset, slots))
            offset += slots * SLOT_BYTES
        self.life, self.requests, self.refusals, self.steps = rings

    def peers(self, joined: Iterable[Peer], left: Iterable[Peer], how: str = "") -> None:
        for peer in left:
            self.peer(Kind.LEFT, peer, how)
        for peer in joined:
            self.peer(Kind.JOINED, peer)

    def peer(self, kind: Kind, peer: Peer, how: str = "") -> None:
        """JOINED or LEFT."""
        name = f"{peer.service}-{peer.instance} {how}".rstrip()
        self.life.add(kind, peer.incarnation, peer.pid, text=name.encode())

    def sequence(self, seq_id: int, what: str, reason: int = 0) -> None:
        """The scheduler's word on one sequence. Details behind a colon stay out: they may quote the request."""
        self.requests.add(Kind.SEQUENCE, seq_id, code=reason, text=what.partition(":")[0].encode())

    def beat(self, state: str, refused: int, bad_frames: int, heartbeat_s: float) -> None:
        """Every heartbeat: notes what has changed since the one before, if anything has."""
        now_s, wall_s = time.monotonic(), time.time()
        BEAT.pack_into(self._buffer, HEAD_BYTES - BEAT.size, now_s, wall_s)
        before_s, self._beat_s = self._beat_s, now_s
        offset_before_s, self._offset_s = self._offset_s, wall_s - now_s
        if before_s:
            self._hold_up(now_s - before_s - heartbeat_s, self._offset_s - offset_before_s)
        if state != self._state:
            self._state = state
            self.life.add(Kind.STATE, text=state.encode())
        if (refused, bad_frames) != self._links:
            before, self._links = self._links, (refused, bad_frames)
            self.life.add(Kind.LINKS, a=refused - before[0], b=bad_frames - before[1])

    def _hold_up(self, late_s: float, moved_s: float) -> None:
        if late_s > STALL_S:
            self.life.add(Kind.STALLED, a=int(late_s * 1000))
        if abs(moved_s) > CLOCK_S:
            self.life.add(Kind.CLOCK, a=max(0, int(moved_s * 1000)), b=max(0, int(-moved_s * 1000)))

    def fault(self, error: BaseException) -> None:
        """An exception that ends the process."""
        self.life.add(Kind.FAULT, text=type(error).__name__.encode())
        self.on_fault(error)

    def read(self) -> dict[RingName, list[Event]]:
        return _rings(bytes(self._buffer))


def open_file(run_dir: Path, peer: Peer, fingerprint: str) -> Recorder:
    """A recorder whose file other processes can read. Raises OSError if there is no room for it."""
    folder = run_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / file_name(peer, "ring")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # the mapping keeps it when the descriptor is closed
        os.posix_fallocate(descriptor, 0, FILE_BYTES)  # else a full disk would be a SIGBUS at some event
        head = msgspec.json.encode(peer)
        os.pwrite(descriptor, MAGIC + len(head).to_bytes(4, "little") + head, 0)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        recorder = Recorder(mmap.mmap(descriptor, FILE_BYTES, flags=flags))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    recorder.life.add(Kind.STARTED, a=peer.pid, text=fingerprint.encode())
    atexit.register(_end, recorder, os.getpid())
    return recorder


def _end(recorder: Recorder, pid: int) -> None:
    if os.getpid() == pid:  # not in a child that was forked
        recorder.life.add(Kind.ENDED)


def file_name(peer: Peer, suffix: str) -> str:
    """Sorts by time among the files of one process, `worker-0.1764450000123.0f3a9c21.ring`."""
    return (
        f"{peer.service}-{peer.instance}.{int(peer.since_s * 1000):013d}.{peer.incarnation & 0xFFFFFFFF:08x}.{suffix}"
    )


def prune(folder: Path, pattern: str, keep: int) -> None:
    """Leaves the newest files, by name."""
    for path in sorted(folder.glob(pattern))[:-keep]:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def read(path: Path) -> Recording | None:
    """What a process, living or dead, has noted; None if the file is none of ours or has gone."""
    try:
        with open(path, "rb") as file:
            # shared, so that those who look at the same time do not take each other for its owner
            alive = not try_lock(file.fileno(), fcntl.LOCK_SH)
            content = file.read()
    except OSError:
        return None
    if len(content) != FILE_BYTES or content[: len(MAGIC)] != MAGIC:
        return None
    start = len(MAGIC) + 4
    size = int.from_bytes(content[len(MAGIC) : start], "little")
    try:
        peer = msgspec.json.decode(content[start : min(start + size, HEAD_BYTES - BEAT.size)], type=Peer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return Recording(peer, _rings(content), BEAT.unpack_from(content, HEAD_BYTES - BEAT.size), alive)


def _rings(content: bytes) -> dict[RingName, list[Event]]:
    found: dict[RingName, list[Event]] = {}
    offset = HEAD_BYTES
    for name, slots in RINGS.items():
        part = content[offset : offset + slots * SLOT_BYTES]
        offset += len(part)
        events = [event for values in SLOT.iter_unpack(part) if (event := _event(values)) is not None]
        found[name] = sorted(events, key=lambda event: event.number)
    return found


def _event(values: tuple[int, float, float, int, int, int, int, int, bytes, int]) -> Event | None:
    number, mono_s, wall_s, kind, code, seq, a, b, text, again = values
    if not number or number != again or kind not in KINDS:
        return None  # never written, or its writer died within it
    shown = text.rstrip(b"\0").decode(errors="replace")
    return Event(number, mono_s, wall_s, Kind(kind), seq, a, b, code, shown if shown.isprintable() else "?")


KINDS = frozenset(kind.value for kind in Kind)
