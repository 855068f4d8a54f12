"""What a person sees: bars while the services start, tables and lines afterwards. Reads states, changes none."""

import json
import shlex
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.protocol import ModelFacts, Status

STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "stopping": "yellow"}


class LastingConsole(Console):
    """Falls silent when nobody reads any more; what it reports on must go on or end in order.

    Lines that cannot be written, to a file on a full disk, are lost; later ones may be written again.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            self._buffer.clear()  # else they would be written again, with every later line


class Stage(NamedTuple):
    """One bar."""

    name: str
    done: int
    total: int  # 0: unknown


def stages(status: Status, expected: int) -> list[Stage]:
    """The bars of this moment: processes that have joined, and what each member reports of its own start."""
    found = [Stage("processes", min(len(status.members), expected), expected)]
    for member in status.members:
        if member.stage:
            name = f"{member.peer.service}-{member.peer.instance}: {member.stage.stage}"
            found.append(Stage(name, member.stage.done, member.stage.total))
    return found


class StartDisplay:
    """Bars on a terminal, one line per new stage elsewhere. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("  {task.description:<28}"), BarColumn(), TextColumn("{task.fields[amount]:>12}"))
        self.console = console
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "StartDisplay":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, current: list[Stage]) -> None:
        """Draws the stages; those that were there before and are gone now are complete."""
        for stage in current:
            if stage.name not in self._tasks:
                self._tasks[stage.name] = self._progress.add_task(stage.name, total=None, amount="")
                if not self.console.is_terminal:
                    self.console.print(f"  {stage.name}", markup=False)
            amount = f"{stage.done:,}/{stage.total:,}" if stage.total else ""
            task = self._tasks[stage.name]
            self._progress.update(task, completed=stage.done, total=stage.total or None, amount=amount)
        names = {stage.name for stage in current}
        for name, task in self._tasks.items():
            if name not in names:
                self._complete(task)

    def complete(self) -> None:
        for task in self._tasks.values():
            self._complete(task)

    def _complete(self, task: TaskID) -> None:
        total = self._progress.tasks[task].total
        amount = f"{total:,.0f}/{total:,.0f}" if total else ""
        self._progress.update(task, completed=total or 1, total=total or 1, amount=amount)


KEY_HEADER = '-H "Authorization: Bearer $VALENCE_API_KEY" '


def example_request(url: str, model: str, keyed: bool = False) -> str:
    """A command that answers when pasted into a shell, which has VALENCE_API_KEY where keys are asked for."""
    body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    return (
        f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"{KEY_HEADER if keyed else ''}-d "
        f"{shlex.quote(json.dumps({**body, 'max_tokens': 64, 'temperature': 0}))}"
    )


def announce(
    console: Console, url: str, model: ModelFacts, logs: Path, command: str, elapsed_s: float, keyed: bool = False
) -> None:
    """What a person needs once everything is ready. `keyed`: the API asks for keys."""
    pools = " + ".join(f"{blocks:,}" for blocks in (model.num_blocks, *model.pools))
    tables = (
        f"{len(model.groups)} block tables" if model.groups else f"{model.num_blocks * model.block_tokens:,} in all"
    )
    lines = [
        f"Ready after {elapsed_s:.1f} s: {model.name} ({model.architecture}, {model.dtype or 'unknown dtype'}), "
        f"at most {model.max_model_len:,} tokens per request",
        f"KV cache: {pools} blocks of {model.block_tokens} tokens, {tables}"
        + (f", in {model.kv_dtype}" if model.kv_dtype else ""),
        "",
        f"  URL   {url}",
        f"  logs  {logs}",
        f"  chat  {command} chat",
        f"  state {command} status",
        "  end   Ctrl-C",
        "",
        example_request(url, model.name, keyed),
        "",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def status_table(document: dict[str, Any], now_s: float) -> Table:
    """`valence status` for people."""
    requests, kv = document["requests"], document["kv"]
    used = kv["blocks_total"] - kv["blocks_free"] - kv["blocks_cached"]
    several = [
        f"scheduler-{each['instance']}: {each['running']} running, {each['waiting']} waiting\n"
        for each in document["schedulers"]
    ]
    table = Table(
        title=f"{document['model'] or 'no model yet'}: {'ready' if document['ready'] else 'not ready'}",
        caption=f"requests: {requests['running']} running, {requests['waiting']} waiting\n"
        f"{''.join(several) if len(several) > 1 else ''}"
        f"KV blocks: {used:,} used, {kv['blocks_cached']:,} cached, {kv['blocks_free']:,} free "
        f"of {kv['blocks_total']:,}",
        title_justify="left",
        caption_justify="left",
    )
    reasons = any(row["reason"] for row in document["processes"])
    for heading in ("service", "instance", "pid", "state", "for", *(["why"] if reasons else [])):
        table.add_column(heading, justify="right" if heading in ("instance", "pid", "for") else "left")
    for row in document["processes"]:
        style = STATE_STYLES.get(row["state"], "red")
        pid = str(row["pid"]) if row["pid"] else "-"
        state = f"[{style}]{row['state']}[/]"
        why = [row["reason"]] if reasons else []
        table.add_row(row["service"], str(row["instance"]), pid, state, duration(now_s - row["since"]), *why)
    return table


def listing_table(rows: list[dict[str, Any]]) -> Table:
    """Any list of like records."""
    table = Table()
    for heading in rows[0] if rows else ():
        table.add_column(heading)
    for row in rows:
        table.add_row(*(", ".join(map(str, cell)) if isinstance(cell, list) else str(cell) for cell in row.values()))
    return table


def duration(seconds: float) -> str:
    """`3 s`, `4 min`, `2 h 05 min`."""
    minutes = int(seconds) // 60
    if minutes < 2:
        return f"{max(0, int(seconds))} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def clock() -> str:
    """Time of day for lines of events."""
    return time.strftime("%H:%M:%S")


def tail(path: Path, count: int) -> list[str]:
    """The last lines of a log file; none if there is no such file."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 64 * 1024))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []
