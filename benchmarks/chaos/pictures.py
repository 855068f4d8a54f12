"""Pictures of chaos runs: pauses per kind of loss, tokens over time under kills, memory over time."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.chaos.judge import Blow, Pauses
from benchmarks.plots import FLOOR, OURS, THEIRS, pyplot_or_none
from valence.programs import SERVICES

COLORS = dict(zip(SERVICES, ("#cf222e", "#8250df", "#1a7f37", "#bf8700"), strict=True))
BIN_S = 1.0


def recovery(found: Sequence[Pauses], arrivals: Sequence[float], blows: Sequence[Blow], title: str, path: str) -> None:
    """Every stream's pause as a point, by kind; below, events per second with the kills."""
    pyplot = pyplot_or_none()
    if pyplot is None:
        return
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(10, 7), height_ratios=(3, 2))
    for place, kind in enumerate(found):
        spread = [place + (i % 21 - 10) / 40 for i in range(len(kind.streams))]
        color = COLORS.get(kind.kind, THEIRS if kind.kind == "none" else FLOOR)
        above.scatter(spread, kind.streams, s=6, alpha=0.35, color=color, linewidths=0)
        if not kind.streams:
            continue
        above.plot([place - 0.35, place + 0.35], [kind.median_s] * 2, color="black", linewidth=1.5)
        above.annotate(f"{kind.median_s:.2f}", (place + 0.37, kind.median_s), fontsize=8, va="center")
    above.set_xticks(range(len(found)), [f"{kind.kind}\n({kind.blows} blows)" for kind in found], fontsize=8)
    above.set_xlim(-0.6, len(found) - 0.2)
    above.set_ylim(bottom=0)
    above.set_title("longest silence of each stream, s (bar: median)", fontsize=9)
    start_s = min([*arrivals, *(blow.at_s for blow in blows)], default=0.0)
    _rate(below, [at_s - start_s for at_s in arrivals])
    _mark(below, blows, start_s)
    below.set_title("events per second at the clients, kills marked", fontsize=9)
    _finish(pyplot, figure, (above, below), title, path)


def memory(
    lives: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]], blows: Sequence[Blow], title: str, path: str
) -> None:
    """`lives`: by process name ("api-0") the lives that it had: times and resident MiB. One panel per service."""
    pyplot = pyplot_or_none()
    if pyplot is None:
        return
    services = [service for service in SERVICES if any(name.startswith(service) for name in lives)]
    figure, axes = pyplot.subplots(len(services), 1, figsize=(10, 2.1 * len(services)), sharex=True, squeeze=False)
    for axis, service in zip(axes[:, 0], services, strict=True):
        names = sorted(name for name in lives if name.rpartition("-")[0] == service)
        for place, name in enumerate(names):
            for number, (times, values) in enumerate(lives[name]):
                color = (OURS, FLOOR, THEIRS)[place % 3]
                axis.plot(times, values, color=color, linewidth=1.2, label=name if not number else None)
        own = [blow for blow in blows if any(victim.service == service for victim in blow.victims)]
        for blow in own:
            axis.axvline(blow.at_s, color=COLORS[service], linewidth=0.7, alpha=0.5)
        most = max((max(values) for name in names for _, values in lives[name]), default=1.0)
        axis.set_ylim(0, most * 1.15)
        axis.set_title(f"{service}: resident MiB, its kills marked", fontsize=9)
        axis.legend(fontsize=7, frameon=False, loc="lower right")
    axes[-1, 0].set_xlabel("seconds", fontsize=8)
    _finish(pyplot, figure, axes[:, 0], title, path)


def _rate(axis: Any, times: Sequence[float]) -> None:
    bins = [0] * (int(max(times, default=0.0) / BIN_S) + 1)
    for at_s in times:
        bins[int(at_s / BIN_S)] += 1
    axis.fill_between(
        [i * BIN_S for i in range(len(bins))], [count / BIN_S for count in bins], step="post", color=OURS, alpha=0.6
    )
    axis.set_ylim(bottom=0)
    axis.set_xlabel("seconds", fontsize=8)


def _mark(axis: Any, blows: Sequence[Blow], start_s: float) -> None:
    named = set()
    for blow in blows:
        for victim in blow.victims:
            label = None if victim.service in named else victim.service
            named.add(victim.service)
            axis.axvline(blow.at_s - start_s, color=COLORS[victim.service], linewidth=0.9, label=label)
    axis.legend(fontsize=7, frameon=True, ncols=4, loc="upper right")


def _finish(pyplot: Any, figure: Any, axes: Sequence[Any], title: str, path: str) -> None:
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    figure.suptitle(textwrap.fill(title, 110), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
