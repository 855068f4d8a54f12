"""Why processes of a run died: reports, native faults, and recordings that just stop. For `valence story --crash`.

Reads files of the run directory and trusts nothing in them; `story_display` shows what is made here.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from common import crash, recorder
from common.protocol import Peer
from common.recorder import Event, Kind, Recording
from valence.supervisor import parse_event

LAST_EVENTS = 40
LOG_BYTES = 1 << 20


class Crash(NamedTuple):
    """One end that was not meant."""

    peer: Peer
    at_s: float
    how: str
    raised: list[crash.Raised]
    native: str  # faulthandler's text
    events: list[Event]
    afterwards: list[str]  # what the supervisor noted

    @property
    def process(self) -> str:
        return f"{self.peer.service}-{self.peer.instance}"


def recordings(run_dir: Path) -> list[Recording]:
    """Of all processes of the run, as far as their files are kept."""
    paths = sorted((run_dir / recorder.FOLDER).glob("*.ring"))
    return [found for path in paths if (found := recorder.read(path)) is not None]


def killed(source: Recording) -> bool:
    """It is gone and could not say so."""
    return not any(event.kind is Kind.ENDED for event in source.rings["life"]) and not source.alive


def crashes(run_dir: Path) -> list[Crash]:
    """All that is known of, newest first: reports, native faults, and processes that just stopped noting."""
    log = _supervisor_lines(run_dir)
    rings = recordings(run_dir)
    by_incarnation = {source.peer.incarnation & 0xFFFFFFFF: source for source in rings}
    found: dict[int, Crash] = {}
    for path in sorted((run_dir / crash.FOLDER).glob("*.json")):
        if report := crash.read(path):
            peer, at_s = report.head.peer, report.head.at_s
            first = report.raised[0] if report.raised else crash.Raised("unknown", "", [])
            how = f"{first.type}: {first.text}" if first.text else first.type
            events = _last(report.events)
            found[peer.incarnation & 0xFFFFFFFF] = Crash(peer, at_s, how, report.raised, "", events, [])
    for path in sorted((run_dir / crash.FOLDER).glob("*.txt")):
        native, written_s = _text(path)
        key = int(path.name.split(".")[2], 16) if re.fullmatch(r"[a-z]+-\d+\.\d+\.[0-9a-f]{8}\.txt", path.name) else -1
        if native and key in by_incarnation:
            source = by_incarnation[key]
            events = source.newest(LAST_EVENTS)
            how = native.partition("\n")[0].removeprefix("Fatal Python error: ")
            found[key] = Crash(source.peer, written_s, how, [], native, events, [])
    for key, source in by_incarnation.items():
        if key not in found and killed(source):
            found[key] = Crash(source.peer, source.last_sign[1], "", [], "", source.newest(LAST_EVENTS), [])
    return sorted((_ended(each, log) for each in found.values()), key=lambda each: each.at_s, reverse=True)


def _ended(found: Crash, log: list[str]) -> Crash:
    """With what the supervisor knows; of a process that could not say anything only it knows how it ended."""
    lines = afterwards(log, found.process, found.peer.pid)
    event = parse_event(lines[0]) if lines else None
    detail = event.detail if event else "it noted no end"
    reason = f"{detail}: kill -9, the kernel for lack of memory, or the machine"
    return found._replace(afterwards=lines, how=found.how or reason)


def _text(path: Path) -> tuple[str, float]:
    """And when it was written. Nothing of a file that has gone: a process removes its own at its end."""
    try:
        with open(path, "rb") as file:
            text, written_s = file.read(LOG_BYTES), os.fstat(file.fileno()).st_mtime
    except OSError:
        return "", 0.0
    return text.decode(errors="replace").strip(), written_s


def _supervisor_lines(run_dir: Path) -> list[str]:
    try:
        with open(run_dir / "log" / "supervisord.log", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def afterwards(lines: Iterable[str], name: str, pid: int) -> list[str]:
    """The supervisor's lines on a process from its end on, until its successor runs."""
    mine = [line for line in lines if re.search(rf"\b{re.escape(name)}\b", line)]
    spawned = [place for place, line in enumerate(mine) if line.endswith(f"with pid {pid}")]
    if not spawned:
        return []
    rest = [line for line in mine[spawned[-1] + 1 :] if "entered RUNNING" not in line or "spawned" in line]
    ends = [place for place, line in enumerate(rest) if "spawned" in line]
    return rest[: ends[0] + 1] if ends else rest[:4]


def _last(events: list[Event]) -> list[Event]:
    """As `Recording.newest`, of what a report kept."""
    steps = [event for event in events if event.kind >= Kind.PLANNED]
    return recorder.newest(
        {"steps": steps, "life": [event for event in events if event.kind < Kind.PLANNED]}, LAST_EVENTS
    )
