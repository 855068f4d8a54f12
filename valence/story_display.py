"""How `valence story` looks in a terminal. Reads what `story` made, changes nothing.

Texts from files are shown as they are, never as markup.
"""

import time
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from common.crash import Frame
from common.recorder import Event, Kind
from valence.crashes import Crash
from valence.story import Listed, Story, Told, phrase

TONES = {"good": "green", "bad": "red", "around": "dim", "": ""}
SERVICES = {"api": "cyan", "tokenizer": "magenta", "scheduler": "yellow", "worker": "blue"}


def clock(at_s: float) -> str:
    """`21:04:59.123`, local time."""
    return time.strftime("%H:%M:%S", time.localtime(at_s)) + f".{int(at_s % 1 * 1000):03d}"


def date(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def process(name: str) -> Text:
    return Text(name, SERVICES.get(name.rpartition("-")[0], ""))


def passed(seconds: float) -> str:
    """`+0.3 ms`, `+12 ms`, `+1.23 s`."""
    if seconds < 0.01:
        return f"+{seconds * 1000:.1f} ms"
    return f"+{seconds * 1000:.0f} ms" if seconds < 1 else f"+{seconds:.2f} s"


def _table() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def show(told: Told, others: list[Crash]) -> RenderableType:
    if isinstance(told, list):
        return requests(told)
    return crash(told, others) if isinstance(told, Crash) else story(told)


def story(told: Story) -> RenderableType:
    begin_s, end_s = told.entries[0], told.entries[-1]
    heading = Text.assemble(("request ", "dim"), (told.request, "bold"))
    heading.append(f"   {date(begin_s.at_s)}, {passed(end_s.mono_s - begin_s.mono_s)[1:]}", "dim")
    table = _table()
    for entry in told.entries:
        what = Text(entry.what, TONES[entry.tone])
        if entry.choice >= 0:
            what.append(f"  choice {entry.choice}", "dim")
        table.add_row(clock(entry.at_s), passed(entry.mono_s - begin_s.mono_s), process(entry.process), what)
    parts: list[RenderableType] = [heading, Text(), table]
    if told.others:
        parts.append(Text(f"\n{told.others} earlier requests had the same id", "dim"))
    return Group(*parts)


def requests(found: Iterable[Listed]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("received", "request", "end"):
        table.add_column(heading, overflow="fold")
    for entry in found:
        style = "yellow" if entry.end == "open" else "red" if entry.end.startswith("error") else ""
        table.add_row(Text(clock(entry.at_s)), Text(entry.request), Text(entry.end, style))
    return Group(table, Text("\nvalence story REQUEST tells one of them", "dim"))


def crash(told: Crash, others: list[Crash]) -> RenderableType:
    heading = Text.assemble(process(told.process), (f" (pid {told.peer.pid}) ", "dim"), (told.how, "bold red"))
    ran_s = max(0.0, told.at_s - told.peer.since_s)
    parts: list[RenderableType] = [heading, Text(f"{date(told.at_s)}, after {ran_s:.1f} s of running", "dim")]
    for place, raised in enumerate(told.raised):
        title = "stack" if not place else f"which came from {raised.type}{': ' + raised.text if raised.text else ''}"
        parts += [_rule(title), Padding(_frames(raised.frames), (0, 0, 0, 2))]
    if told.native:
        parts += [_rule("stack of a native fault"), Padding(Text(told.native), (0, 0, 0, 2))]
    if told.events:
        parts += [_rule(f"the last {len(told.events)} events"), Padding(_events(told), (0, 0, 0, 2))]
    parts.append(_rule("afterwards, by the supervisor"))
    nothing = ["nothing is noted"]
    parts += [Padding(Text(line), (0, 0, 0, 2)) for line in told.afterwards or nothing]
    if others:
        parts.append(_rule("earlier"))
        parts += [Padding(Text(f"{date(each.at_s)}  {each.process}  {each.how}"), (0, 0, 0, 2)) for each in others]
    return Group(*parts)


def _rule(title: str) -> Padding:
    return Padding(Rule(Text(title, "bold"), align="left", style="dim"), (1, 0, 0, 0))


def _frames(frames: list[Frame]) -> Text:
    text = Text()
    for frame in frames:
        text.append(f"{frame.file}:{frame.line}", "cyan")
        text.append(f" {frame.function}\n")
        if frame.code:
            text.append(f"    {frame.code}\n", "dim")
    text.rstrip()
    return text


def _events(told: Crash) -> Table:
    table = _table()
    end_s = told.events[-1].mono_s
    for event in told.events:
        what, tone = phrase(event)
        when = clock(event.wall_s), f"-{passed(end_s - event.mono_s)[1:]}"
        table.add_row(*when, Text(what, TONES[tone]).append(_sequence(event), "dim"))
    return table


def _sequence(event: Event) -> str:
    """The sequence that an event is about, if it is about one."""
    about_one = Kind.FIRST_TEXT <= event.kind < Kind.PLANNED and event.seq
    return f"  {event.seq:#018x}" if about_one else ""
