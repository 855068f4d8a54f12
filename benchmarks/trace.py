"""What the GPU did in a traced stretch: busy and idle time, and the kernels by time.

torch's profiler writes a Chrome trace; kernels inside a replayed graph appear in it one by one. Kernels that overlap
(programmatic launch) count once. Tracing slows the host and, a little, the GPU.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
TOP = 14


class Kernel(NamedTuple):
    """All runs of one kernel."""

    name: str
    calls: int
    total_us: float


class Trace(NamedTuple):
    """`span_us`: from the first kernel's start to the last one's end; `busy_us`: of it with any kernel at work.

    `idle`: share of the last three quarters of the span. In the first the host may still be catching up.
    """

    span_us: float
    busy_us: float
    idle: float
    kernels: list[Kernel]

    @property
    def launches(self) -> int:
        return sum(kernel.calls for kernel in self.kernels)


def record(work: Callable[[], object]) -> Trace:
    """Runs `work` under the profiler and waits for the device."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="valence-") as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return read(json.loads(path.read_text())["traceEvents"])


def read(events: Iterable[dict[str, Any]]) -> Trace:
    """From the events of a Chrome trace, times in microseconds."""
    work = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in DEVICE_WORK
    )
    if not work:
        return Trace(0.0, 0.0, float("nan"), [])
    found: dict[str, tuple[int, float]] = {}
    for start, end, name in work:
        calls, total_us = found.get(name, (0, 0.0))
        found[name] = (calls + 1, total_us + end - start)
    kernels = [Kernel(name, *figures) for name, figures in found.items()]
    kernels.sort(key=lambda kernel: -kernel.total_us)
    begin, finish = work[0][0], max(end for _, end, _ in work)
    settled = begin + (finish - begin) / 4
    idle = 1 - _busy_us(work, settled) / (finish - settled) if finish > begin else float("nan")
    return Trace(finish - begin, _busy_us(work, begin), idle, kernels)


def _busy_us(work: Iterable[tuple[float, float, str]], since_us: float) -> float:
    """Time with any of `work` running, which is in order of its starts."""
    busy_us, reached = 0.0, since_us
    for start, end, _ in work:
        busy_us += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy_us


def short(name: str) -> str:
    """A kernel's name without its template and argument lists."""
    name = re.sub(r"^void ", "", name).replace("(anonymous namespace)::", "")
    bare = re.sub(r"<.*", "", name.partition("(")[0])
    inner = re.search(r"(\w+)(?:_functor|Functor|_kernel_cuda)", name)
    return f"{bare.rpartition('::')[2]} {inner[1]}" if inner and "elementwise" in bare else bare.rpartition("::")[2]


def table(trace: Trace, steps: int, title: str) -> Table:
    """Kernels by time, per step."""
    found = Table(title=title)
    found.add_column("kernel", no_wrap=True, max_width=64)
    for name in ("calls/step", "us/call", "us/step", "share"):
        found.add_column(name, justify="right")
    total_us = sum(kernel.total_us for kernel in trace.kernels)
    for kernel in trace.kernels[:TOP]:
        found.add_row(
            short(kernel.name),
            f"{kernel.calls / steps:.1f}",
            f"{kernel.total_us / kernel.calls:.2f}",
            f"{kernel.total_us / steps:.1f}",
            f"{kernel.total_us / total_us:.1%}",
        )
    rest = trace.kernels[TOP:]
    if rest:
        calls, rest_us = sum(kernel.calls for kernel in rest), sum(kernel.total_us for kernel in rest)
        found.add_row(
            f"{len(rest)} others", f"{calls / steps:.1f}", "", f"{rest_us / steps:.1f}", f"{rest_us / total_us:.1%}"
        )
    return found
