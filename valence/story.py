"""`valence story`: what the processes of a run noted about one request.

It comes from their flight recorders' files, of the living and the dead; `story_display` shows what is made here. Order
is that of the monotonic clock, which all processes of a host share; the wall clock is only shown.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from common.protocol import FinishReason, tokenizer_of
from common.recorder import ALL, TEXT_BYTES, Event, Kind, Recording, RingName
from valence import rundir
from valence.crashes import Crash, crashes, killed, recordings
from valence.errors import CommandError
from valence.status import StatusClient

ANSWER_ID = re.compile(r"^(chatcmpl|cmpl)-")
SAME_REQUEST_S = 0.001  # prompts of one request are noted at once
REQUESTS_LISTED = 20
ABOUT_ONE: tuple[RingName, ...] = ("requests", "refusals")
AROUND = frozenset((Kind.STARTED, Kind.ENDED, Kind.FAULT, Kind.STALLED, Kind.CLOCK, Kind.LINKS, Kind.READMITTED))


class Entry(NamedTuple):
    """One line of a story."""

    mono_s: float
    at_s: float  # Unix time
    process: str
    what: str
    tone: str = ""  # "good", "bad", "around" (not of this request), or nothing
    choice: int = -1  # where the request has several


class Story(NamedTuple):
    request: str  # the client's id
    ids: list[int]  # all names that its sequences had
    entries: list[Entry]
    others: int  # requests with the same id, before this one


def number_of(name: str) -> int | None:
    """A sequence's number as it stands in logs and stories."""
    found = int(name, 0) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}|[1-9]\d{0,19}", name) else ALL + 1
    return found if found <= ALL else None


class Received(NamedTuple):
    mono_s: float  # when it came
    at_s: float
    event: Event
    source: Recording


def received(found: list[Recording]) -> list[Received]:
    """All requests (one entry per prompt) in order of their arrival."""
    entries = [
        Received(event.mono_s - event.b / 1e6, event.wall_s - event.b / 1e6, event, source)
        for source in found
        for event in source.rings["requests"]
        if event.kind is Kind.RECEIVED
    ]
    return sorted(entries, key=lambda entry: entry.mono_s)


def tell(found: list[Recording], name: str) -> Story:
    """The story of a request: its id as the client saw it, or a sequence's number. Raises CommandError."""
    arrived = received(found)
    number = number_of(name)
    for identity in dict.fromkeys((name, ANSWER_ID.sub("", name))):
        mine = [entry for entry in arrived if entry.event.text == _cut(identity)]
        if mine:
            newest = [entry for entry in mine if _together(entry, mine[-1])]
            others = len({entry.mono_s for entry in mine if not _together(entry, mine[-1])})
            return _story(found, identity, newest, others)
        if refused := list(_entries(found, {}, identity, None)):
            return Story(identity, [], sorted(refused), 0)
    if number is not None:
        firsts = _grown(found, {number})
        newest = [entry for entry in arrived if firsts & set(_choices(entry))]
        story = _story(found, newest[-1].event.text if newest else name, newest[-1:], 0, firsts)
        if story.entries:
            return story
    raise CommandError(
        f"nothing is recorded of {name!r}: it is unknown here, or so old that newer requests have taken its place"
    )


def _cut(identity: str) -> str:
    """As much of it as is recorded."""
    return identity.encode()[:TEXT_BYTES].decode(errors="ignore")


def _together(first: Received, second: Received) -> bool:
    return first.source is second.source and abs(first.mono_s - second.mono_s) < SAME_REQUEST_S


def _choices(entry: Received) -> range:
    return range(entry.event.seq, entry.event.seq + min(entry.event.a, 1 << 16))


def _grown(found: list[Recording], ids: set[int]) -> set[int]:
    """With the names that the sequences got, or had, at other tokenizers."""
    moves = [
        (event.seq, event.a if event.kind is Kind.MOVED else event.b)
        for source in found
        for event in source.rings["requests"]
        if event.kind is Kind.MOVED or (event.kind is Kind.SUBMITTED and event.b)
    ]
    ids, size = set(ids), 0
    while len(ids) > size:
        size = len(ids)
        for now, first in moves:
            if now in ids or first in ids:
                ids |= {now, first}
    return ids


def _story(
    found: list[Recording], identity: str, prompts: list[Received], others: int, ids: set[int] | None = None
) -> Story:
    choices: dict[int, int] = {}
    for entry in prompts:
        for seq_id in _choices(entry):
            place = len(set(choices.values()))
            for name in _grown(found, {seq_id}):
                choices[name] = place
    for name in ids or ():
        choices.setdefault(name, 0)
    entries = list(_entries(found, choices, identity, prompts[0] if prompts else None))
    if entries:
        # What has no end yet may still be going on.
        ended = any(entry.tone in ("good", "bad") and "answered" in entry.what for entry in entries)
        until_s = max(entry.mono_s for entry in entries) if ended else float("inf")
        entries += _around(found, min(entry.mono_s for entry in entries), until_s)
    several = len(set(choices.values())) > 1
    entries = [entry if several else entry._replace(choice=-1) for entry in entries]
    return Story(identity, sorted(choices), sorted(entries), others)


def _entries(
    found: list[Recording], choices: dict[int, int], identity: str, arrival: Received | None
) -> Iterator[Entry]:
    for source in found:
        for ring in ABOUT_ONE:
            for event in source.rings[ring]:
                refused = event.kind is Kind.REFUSED and event.text == _cut(identity)
                # The API's id for a request that it refuses is the client's; the others know sequences.
                if refused and arrival is not None and event.mono_s < arrival.mono_s:
                    continue
                known = event.seq in choices if event.seq else refused
                if known:
                    yield _entry(source, event, choices.get(event.seq, -1))


def _entry(source: Recording, event: Event, choice: int = -1) -> Entry:
    before_s = event.b / 1e6 if event.kind is Kind.RECEIVED else 0.0
    what, tone = phrase(event)
    return Entry(event.mono_s - before_s, event.wall_s - before_s, source.name, what, tone, choice)


def _around(found: list[Recording], since_s: float, until_s: float) -> Iterator[Entry]:
    """What happened to the system meanwhile."""
    for source in found:
        for event in source.rings["life"]:
            comes_or_goes = event.kind in (Kind.JOINED, Kind.LEFT) and source.peer.service == "scheduler"
            if since_s <= event.mono_s <= until_s and (event.kind in AROUND or comes_or_goes):
                yield _entry(source, event)._replace(tone="around")
        mono_s, wall_s = source.last_sign
        if since_s <= mono_s <= until_s and killed(source):
            yield Entry(mono_s, wall_s, source.name, f"the last sign of pid {source.peer.pid}, which was killed", "bad")


def phrase(event: Event) -> tuple[str, str]:
    """An event in words, and its tone."""
    seq, a, b, text = event.seq, event.a, event.b, event.text
    choices = f", {a} choices" if a > 1 else ""
    phrases: dict[Kind, str] = {
        Kind.STARTED: f"started (pid {a}) with settings {text}",
        Kind.STATE: f"is {text}",
        Kind.JOINED: f"{text} joined (pid {a})",
        Kind.LEFT: text if " " in text else f"{text} left",
        Kind.READMITTED: f"a new scheduler: handed it {a} open requests",
        Kind.LINKS: f"links: {a} sends refused, {b} frames unreadable",
        Kind.CLOCK: f"the wall clock moved by {(a - b) / 1000:+.1f} s",
        Kind.STALLED: f"stood still for {a / 1000:.1f} s",
        Kind.SIGNAL: f"asked to stop (signal {a})",
        Kind.FAULT: f"fault: {text}",
        Kind.ENDED: "ended",
        Kind.RECEIVED: f"received {text} as {seq:#018x}{choices}",
        Kind.FIRST_TEXT: "first text",
        Kind.WAITING: "the tokenizer has gone; waits for another",
        Kind.MOVED: f"moved to tokenizer-{tokenizer_of(seq)} as {seq:#018x}",
        Kind.ANSWERED: f"answered: {_reason(event.code)}, {a} tokens" + (f", {b} of the prompt cached" if b else ""),
        Kind.SUBMITTED: f"takes over {b:#018x}" if b else f"begins to encode{choices}",
        Kind.ENCODED: f"encoded: {a} tokens",
        Kind.ABORTED: "given up by the API",
        Kind.SEQUENCE: f"ended: {text}" if event.code else text,
        Kind.ROW: f"row in slot {event.code} from step {a}, {b} tokens have KV",
        Kind.REFUSED: f"refused: HTTP {a}" if a else f"refused: {text}",
        Kind.PLANNED: f"step {a} planned: {b} rows, {event.code} new",
        Kind.STEP: f"step {a}: {event.code} rows" + (f"; the last took {b / 1000:.1f} ms" if b else ""),
    }
    bad = event.kind in (Kind.REFUSED, Kind.FAULT, Kind.STALLED, Kind.CLOCK, Kind.WAITING)
    bad |= event.code == FinishReason.ERROR and event.kind in (Kind.ANSWERED, Kind.SEQUENCE)
    bad |= event.kind is Kind.SEQUENCE and text.startswith(("worker lost", "preempted", "tokenizer-"))
    return phrases[event.kind], "bad" if bad else "good" if event.kind is Kind.ANSWERED else ""


def _reason(code: int) -> str:
    return FinishReason(code).name.lower() if code in set(FinishReason) else str(code)


class Listed(NamedTuple):
    request: str
    at_s: float
    end: str


def newest_requests(found: list[Recording], count: int = REQUESTS_LISTED) -> list[Listed]:
    """The last requests and how each ended, so that a person finds the id to ask for."""
    ends: dict[int, str] = {}
    for source in found:
        for event in source.rings["requests"]:
            if event.kind is Kind.ANSWERED:
                ends[event.seq] = phrase(event)[0].removeprefix("answered: ")
            elif event.kind is Kind.MOVED:
                ends.setdefault(event.a, "moved")
    for source in found:
        for event in source.rings["requests"]:
            if event.kind is Kind.MOVED and event.seq in ends:
                ends[event.a] = ends[event.seq]
    listed: list[Listed] = []
    arrived = received(found)
    for place, entry in enumerate(arrived):
        if not place or not _together(entry, arrived[place - 1]):
            listed.append(Listed(entry.event.text, entry.at_s, ends.get(entry.event.seq, "open")))
    return listed[-count:]


Told = Story | Crash | list[Listed]


def ask(run_dir: Path, request: str, crashed: bool) -> tuple[Told, list[Crash]]:
    """What `valence story` was asked for, and the crashes before the one told. Raises CommandError."""
    if crashed:
        mine = [each for each in crashes(run_dir) if request in ("", each.process, each.peer.service)]
        if not mine:
            raise CommandError(f"no crash{' of ' + request if request else ''} is recorded in {run_dir}")
        return mine[0], mine[1:]
    found = recordings(run_dir)
    if not request:
        return newest_requests(found), []
    try:
        return tell(found, request), []
    except CommandError:
        if entries := asked_scheduler(run_dir, request):
            return Story(request, [], entries, 0), []
        raise


def asked_scheduler(run_dir: Path, request: str) -> list[Entry]:
    """What the scheduler itself still knows of a sequence: it may run on another host, or remember longer."""
    number = number_of(request)
    if number is None or not (run_dir / "config.toml").exists():
        return []
    with StatusClient(rundir.running_config(run_dir)) as client:
        lines = client.story(number)
    clock_s = time.time() - time.monotonic()
    entries = []
    for line in lines[1:]:
        at, _, what = line.partition(" ")
        entries.append(Entry(float(at), float(at) + clock_s, "scheduler-0", what))
    return entries


def document(told: Told) -> Any:
    """For programs: the same fields; sequences' numbers as they appear in other places, in hexadecimal."""
    if isinstance(told, list):
        return [entry._asdict() for entry in told]
    if isinstance(told, Crash):
        return {
            "process": told.process,
            "pid": told.peer.pid,
            "since_s": told.peer.since_s,
            "at_s": told.at_s,
            "how": told.how,
            "raised": msgspec.to_builtins(told.raised),
            "native": told.native,
            "events": [_event_document(event) for event in told.events],
            "afterwards": told.afterwards,
        }
    entries = [entry._asdict() for entry in told.entries]
    return told._asdict() | {"ids": [f"{seq_id:#018x}" for seq_id in told.ids], "entries": entries}


def _event_document(event: Event) -> dict[str, Any]:
    return {"at_s": event.wall_s, "kind": event.kind.name.lower(), "seq": event.seq, "what": phrase(event)[0]}
