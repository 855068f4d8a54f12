"""`valence doctor` for people: tables of the host, its devices and the ops, then what to do. Reads, changes nothing."""

import re
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from services.worker.devices import Device
from valence.doctor import UNLIMITED, Finding, Host, size_text

TESTED_STYLES = {"is the meaning": "dim", "not tested": "yellow", "no case of this model": "dim"}


def report(host: Host, findings: Sequence[Finding]) -> RenderableType:
    """Everything, the verdict last, where a person's eye is."""
    parts: list[RenderableType] = [_facts(host), Text("")]
    parts.append(_devices(host.devices) if host.devices else _no_devices())
    if links := list(_links(host.devices)):
        parts.append(_matrix(host.devices, links))
    parts += [_nodes(host)] if host.nodes else []
    parts += [_folders(host), _ops(host)] if host.ops else [_folders(host)]
    return Group(*parts, verdict(findings))


def verdict(findings: Sequence[Finding]) -> RenderableType:
    errors = sum(1 for finding in findings if finding.level == "error")
    if not findings:
        return Text("Nothing is wrong.", style="bold green")
    lines: list[RenderableType] = []
    for finding in findings:
        style, mark = ("bold red", "✗") if finding.level == "error" else ("yellow", "!")
        lines.append(Text.assemble((f"{mark} ", style), (finding.what, style)))
        lines.append(Text.assemble("  → ", finding.do))
    summary = f"{_count(errors, 'error')}, {_count(len(findings) - errors, 'warning')}"
    return Group(*lines, Text(""), Text(summary, style="bold red" if errors else "bold green"))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(title: str, *headings: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return table


def _facts(host: Host) -> Table:
    table = Table("", "", title="Host", title_justify="left", title_style="bold", box=None, show_header=False)
    for name, value in host.system.items():
        table.add_row(name, escape(value))
    versions = ", ".join(f"{name} {value}" for name, value in host.versions.items() if value)
    table.add_row("versions", escape(versions))
    if missing := [name for name, value in host.versions.items() if not value]:
        table.add_row("not there", f"[dim]{', '.join(missing)}[/]")
    files, locked, shm = host.limits
    table.add_row("limits", f"{_most(files)} open files, {size_text(locked)} locked memory, {size_text(shm)} /dev/shm")
    table.add_row("groups", escape(", ".join(host.groups)))
    return table


def _devices(devices: Sequence[Device]) -> Table:
    headings = ("#", "GPU", "arch", "CUs", "memory", "mode", "PCI", "NUMA", "CPUs", "render", "")
    table = _table("GPUs", *headings, right=("#", "CUs", "memory", "NUMA"))
    for device in devices:
        part = f"/{device.partition}" if device.partition else ""
        table.add_row(
            str(device.index) if device.index >= 0 else "-",
            escape(device.product),
            device.arch or "?",
            str(device.compute_units or "?"),
            size_text(device.memory_bytes) if device.memory_bytes else "?",
            device.mode or "-",
            f"{device.pci}{part}",
            str(device.numa_node) if device.numa_node >= 0 else "-",
            _span(device.cpus),
            device.render.removeprefix("/dev/dri/"),
            f"[red]{escape(device.trouble)}[/]" if device.trouble else "",
        )
    return table


def _no_devices() -> Text:
    return Text("No GPU: the worker runs on the CPU.\n", style="dim")


def _links(devices: Sequence[Device]) -> Iterator[tuple[int, int, str]]:
    for device in devices:
        for link in device.links:
            yield device.index, link.device, f"{link.kind} {link.weight}"


def _matrix(devices: Sequence[Device], links: Sequence[tuple[int, int, str]]) -> RenderableType:
    """Links among GPUs; where all are alike, one line says it."""
    indices = [device.index for device in devices if device.index >= 0]
    kinds = {kind for _, _, kind in links}
    if len(kinds) == 1 and len(links) == len(indices) * (len(indices) - 1):
        return Text(f"All GPUs are linked to each other by {kinds.pop().split()[0]}.\n")
    if len(indices) > 16:
        return Text(f"Links: {', '.join(f'{_count_of(links, kind)} of {kind}' for kind in sorted(kinds))}.\n")
    known = {(source, target): kind for source, target, kind in links}
    table = _table("Links (less is nearer)", "", *map(str, indices))
    for source in indices:
        table.add_row(str(source), *(known.get((source, target), "-") for target in indices))
    return table


def _count_of(links: Sequence[tuple[int, int, str]], kind: str) -> int:
    return sum(1 for _, _, each in links if each == kind)


def _nodes(host: Host) -> Table:
    """Device files of the same kind in one row."""
    table = _table("Device files", "", "mode", "owner", "")
    rows: dict[tuple[str, str, bool], list[str]] = {}
    for node in host.nodes:
        rows.setdefault((node.mode, node.owner, node.usable), []).append(node.path)
    for (mode, owner, usable), paths in rows.items():
        state = "[green]can be opened[/]" if usable else "[red]may not be opened[/]"
        table.add_row(", ".join(paths), mode, escape(owner), state)
    return table


def _folders(host: Host) -> Table:
    table = _table("Caches and folders", "", "path", "size", "files", "", right=("size", "files"))
    for cache in host.caches:
        table.add_row(cache.name, escape(cache.path), size_text(cache.size), f"{cache.files:,}", cache.note)
    table.add_row(
        "run directory", escape(host.run_dir), "", "", "[red]cannot be used[/]" if host.run_dir_trouble else ""
    )
    table.caption = f"{size_text(host.cache_free)} free for caches"
    table.caption_justify = "left"
    return table


def _ops(host: Host) -> Table:
    table = _table(f"Ops: {escape(host.model)}", "op", "by", "self-test", "why")
    for row in host.ops:
        style = TESTED_STYLES.get(row.tested, "green")
        why = "" if row.reason == "first choice" else re.sub(r"\b(\w+): \1 ", r"\1 ", row.reason)
        table.add_row(row.op, row.provider, f"[{style}]{row.tested}[/]", f"[dim]{escape(why)}[/]")
    return table


def _most(number: int) -> str:
    return "any number of" if number == UNLIMITED else f"{number:,}"


def _span(cpus: Sequence[int]) -> str:
    """`0-95,192-287`; empty for none."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if first != last else str(first) for first, last in parts)
