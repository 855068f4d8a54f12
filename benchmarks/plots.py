"""Pictures of results. matplotlib is asked for only here: without it a benchmark says so and goes on."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.latency import Summary
from benchmarks.peers import PEERS, VLLM

OURS, THEIRS, FLOOR = "#1f6feb", "#9aa4b2", "#d29922"


class Bars(NamedTuple):
    """Groups of bars: by label the values of each series, NaN where there is none."""

    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]


def pyplot_or_none() -> Any:
    """None, having said so, without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        Console().print("no picture: matplotlib is not installed")
        return None
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def draw(panels: Sequence[Bars], title: str, path: str) -> None:
    """One panel beside the other, written as PNG to `path`."""
    pyplot = pyplot_or_none()
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        width = 0.8 / max(len(panel.series), 1)
        for place, (name, values) in enumerate(panel.series.items()):
            color = THEIRS if name == VLLM else FLOOR if name == "floor" else OURS if place == 0 else None
            positions = [group + (place - (len(panel.series) - 1) / 2) * width for group in range(len(panel.labels))]
            axis.bar(positions, values, width, label=name, color=color)
        axis.set_xticks(range(len(panel.labels)), panel.labels)
        axis.set_title(f"{panel.title}, {panel.unit}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def served(points: Mapping[str, Summary], model: str, path: str) -> None:
    """Throughput and latencies by load, beside vLLM's where they are known."""
    missing = float("nan")
    peers = PEERS[model].served if model in PEERS else {}
    theirs = [peers.get(int(name[1:])) if name.startswith("c") else None for name in points]
    panels = [
        Bars(
            "output",
            "tokens/s",
            list(points),
            {"Valence": [point.output_per_s for point in points.values()]}
            | ({VLLM: [peer.output_per_s if peer else missing for peer in theirs]} if peers else {}),
        ),
        Bars(
            "TTFT, median",
            "ms",
            list(points),
            {"Valence": [point.ttft_ms.p50 for point in points.values()]}
            | ({VLLM: [peer.ttft_ms if peer else missing for peer in theirs]} if peers else {}),
        ),
        Bars(
            "inter-token latency",
            "ms",
            list(points),
            {
                "Valence p99": [point.itl_ms.p99 for point in points.values()],
                "p50": [point.itl_ms.p50 for point in points.values()],
            }
            | ({VLLM: [peer.itl_ms if peer else missing for peer in theirs]} if peers else {}),
        ),
    ]
    draw(panels, f"{model} over HTTP", path)
