"""Layout of decode attention: every benchmarked model's heads, some batch sizes, short, long and uneven contexts.

The launcher knows the number of rows and not their contexts, so a row of the table serves all contexts measured at that
size: the choice with the least product of times, short ones counting double. KV lies in scattered blocks, in more
memory than L2 holds. Few rows are timed behind rope_kv_write, as in a step, since what they read ahead hides behind it;
their `us` is what attention adds to it. Rows that were not measured keep what the table has.

By itself, to measure only batches of at most so many rows: python -m benchmarks.tune_attention --most-rows 16
"""

import argparse
import gc
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from benchmarks.shapes import MODELS
from benchmarks.tune import H200_READ, read_bandwidth
from benchmarks.tuning import Bench, Row, Section, Tuned, seconds
from services.worker.kernels import tuned
from services.worker.kernels.impl.triton._decode_attention import Shape, default_shape, launch, small_lds
from services.worker.kernels.impl.triton.rope_kv_write import rope_kv_write_heads
from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec, paged_attention

LIMIT_S = 55.0  # of the tuner's budget
PAGE = 16
ROTATED = 200 << 20  # bytes of KV between two uses of the same
MOST_LAUNCHES = 64
FEW = 16  # rows for which few_kernel is measured too
PARTS = (4, 8, 16, 32, 64)
GEOMETRY_OF_FEW = ((64, 4, 3), (64, 8, 2), (128, 8, 2), (32, 4, 3), (32, 2, 4), (64, 4, 2))
GEOMETRY_BESIDE = ((64, 4, 3), (32, 2, 4), (128, 8, 3))  # of decode_kernel, where only few rows are measured
KEYS = ("kv_heads", "share", "head_dim", "kv_bytes", "rows")  # two rows with the same are of one shape
SHORT, LONG, LONGEST = 640, 8192, 100_000
BATCHES = (1, 4, 8, 16, 64, 256, 512)
WAVES = (0.5, 1.0, 2.0, 3.0, 4.0)
GEOMETRY = (
    (64, 4, 3), (64, 4, 2), (32, 4, 4), (64, 4, 4), (128, 4, 2), (128, 8, 2),
    (32, 4, 3), (32, 4, 5), (32, 2, 4), (64, 8, 3), (128, 8, 3),
)  # fmt: skip


class Heads(NamedTuple):
    query: int
    kv: int
    size: int

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values."""
        return 4 * self.kv * self.size


class Task(NamedTuple):
    """What a process needs to compile one candidate."""

    heads: Heads
    rows: int
    shape: Shape


def contexts(rows: int) -> dict[str, list[int]]:
    """What is measured at this batch size; the first names the row's `us`."""
    found = {"us": [SHORT] * rows}
    if rows in (1, 8):
        found |= {f"us_{length}": [length] * rows for length in (LONG, LONGEST)}
    if rows == 64:
        found["us_uneven"] = [SHORT] * (rows - 1) + [LONGEST]
    return found


def candidates(device: torch.device) -> list[Shape]:
    """Without `waves`, for which nothing is compiled."""
    fused = torch.version.hip is None
    shapes = [Shape(*geometry, waves=2.0, fused=fused) for geometry in GEOMETRY]
    if fused:
        shapes += [shape._replace(fused=False) for shape in shapes[:2]]
    default = default_shape(2, 2, 128, small_lds(device))
    return [default, *(shape for shape in shapes if shape != default)]


def candidates_of_few(device: torch.device) -> list[Shape]:
    """With any number of `parts`, for which nothing is compiled."""
    fused = torch.version.hip is None
    return [Shape(*geometry, waves=0.0, fused=fused, parts=PARTS[0]) for geometry in GEOMETRY_OF_FEW]


def variants(shape: Shape, rows: int, num_kv_heads: int) -> list[Shape]:
    """What is measured of one compiled kernel: how many programs there may be."""
    if shape.parts:
        # beyond, most would be empty, or a row would hold all others up
        return [shape._replace(parts=parts) for parts in PARTS if rows * parts <= 256]
    waves = WAVES if rows * num_kv_heads < 1024 else (2.0,)
    return [shape._replace(waves=w) for w in waves]


def make_rows(lengths: Sequence[int], tables: Tensor) -> AttentionRows:
    device = tables.device
    return AttentionRows(
        query_starts=torch.arange(len(lengths) + 1, dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=tables,
        block_tokens=PAGE,
        max_query=1,
        max_context=max(lengths),
        num_decode=len(lengths),
    )


class Tensors:
    """One batch's queries, and block tables of several batches into one pool."""

    def __init__(self, heads: Heads, lengths: Sequence[int], pool: Tensor) -> None:
        rows, device = len(lengths), pool.device
        self.spec = AttentionSpec(heads.size**-0.5)
        self.q = torch.randn(rows, heads.query, heads.size, dtype=torch.bfloat16, device=device)
        self.out = torch.empty_like(self.q)
        blocks = len(pool) // (2 * PAGE * heads.kv * heads.size)
        cache = pool[: 2 * blocks * PAGE * heads.kv * heads.size].view(2, blocks, PAGE, heads.kv, heads.size)
        self.k, self.v = cache[0], cache[1]
        width = -(-max(lengths) // PAGE)
        self.bytes = sum(lengths) * heads.token_bytes
        needed = rows * width if min(lengths) == max(lengths) else width + rows * -(-SHORT // PAGE)
        count = max(1, min(MOST_LAUNCHES, math.ceil(ROTATED / self.bytes), blocks // needed))
        order = torch.randperm(blocks, device=device).to(torch.int32)
        self.batches = []
        for index in range(count):
            own = order[index * needed : (index + 1) * needed]
            # an uneven batch's short rows share their table's unread end with the long row
            starts = torch.arange(rows, device=device) * (width if needed == rows * width else -(-SHORT // PAGE))
            places = (starts[:, None] + torch.arange(width, device=device)) % needed
            self.batches.append(make_rows(lengths, own[places]))
        self.ahead: list[Callable[[], object]] = []
        self.ahead_s = 0.0

    def put_writes_ahead(self) -> None:
        """From now on `time` gives what attention adds to them."""
        self.ahead = [self.write(batch) for batch in self.batches]
        self.ahead_s = seconds(self.rounds(self.ahead), span_s=0.002)

    def write(self, batch: AttentionRows) -> Callable[[], object]:
        """The launch that comes before attention in a step: the newest tokens' keys and values."""
        rows, heads, size = self.q.shape
        device, newest = self.q.device, batch.context_lens - 1
        pages = batch.block_tables[torch.arange(rows, device=device), newest // PAGE]
        slots = pages.long() * PAGE + newest % PAGE
        qkv = torch.randn(rows, (heads + 2 * self.k.shape[2]) * size, dtype=self.q.dtype, device=device)
        angles = torch.randn(2, rows, 1, size, dtype=self.q.dtype, device=device)
        return lambda: rope_kv_write_heads(qkv, angles[0], angles[1], self.k, self.v, slots, None, None)

    def rounds(self, launches: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
        return list(launches) * (math.ceil(10 / len(launches)) if self.bytes < 100 << 20 else 1)

    def run(self, shape: Shape, rows: AttentionRows) -> None:
        launch(self.q, self.out, self.k, self.v, rows, self.spec, shape)

    def holds(self, shape: Shape, wanted: Tensor) -> bool:
        self.out.fill_(torch.nan)
        self.run(shape, self.batches[0])
        return torch.allclose(self.out, wanted, rtol=2e-2, atol=3e-3)

    def wanted(self) -> Tensor:
        return paged_attention.meaning(self.q, self.k, self.v, self.batches[0], self.spec)

    def time(self, shape: Shape) -> float:
        def one(place: int) -> Callable[[], None]:
            def launches() -> None:
                if self.ahead:
                    self.ahead[place]()
                self.run(shape, self.batches[place])

            return launches

        together = self.rounds([one(place) for place in range(len(self.batches))])
        return max(seconds(together, span_s=0.002) - self.ahead_s, 1e-8)


def compiled(task: Task) -> tuple[Task, str]:
    """In a process of its own: launches once; returns why it cannot be, or nothing."""
    try:
        pool = torch.zeros(2 * PAGE * task.heads.kv * task.heads.size, dtype=torch.bfloat16, device="cuda")
        cache = pool.view(2, 1, PAGE, task.heads.kv, task.heads.size)
        q = torch.zeros(task.rows, task.heads.query, task.heads.size, dtype=torch.bfloat16, device="cuda")
        rows = make_rows([PAGE] * task.rows, torch.zeros(task.rows, 1, dtype=torch.int32, device="cuda"))
        launch(q, torch.empty_like(q), cache[0], cache[1], rows, AttentionSpec(1.0), task.shape)
        torch.cuda.synchronize()
    except (TritonError, RuntimeError) as error:
        return task, f"{type(error).__name__}: {error}"
    return task, ""


def compile_all(bench: Bench, tasks: Sequence[Task], until: float) -> set[Task]:
    """The tasks whose kernels run, of those that are ready in time."""
    good = set()
    with multiprocessing.get_context("spawn").Pool(min(bench.workers, len(tasks))) as pool:
        results = pool.imap_unordered(compiled, tasks)
        for _ in tasks:
            try:
                task, reason = results.next(max(0.01, until - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
            if reason:
                print(f"{task}: {reason.splitlines()[0][:160]}")
            else:
                good.add(task)
    print(f"{len(good)} of {len(tasks)} kernels compiled")
    return good


def best(bench: Bench, heads: Heads, rows: int, shapes: Sequence[Shape], pool: Tensor) -> Row:
    """The table's row for these heads and this many rows."""
    measured: dict[Shape, dict[str, float]] = {}
    floors: dict[str, float] = {}
    for name, lengths in contexts(rows).items():
        tensors = Tensors(heads, lengths, pool)
        if rows <= FEW:
            tensors.put_writes_ahead()
        floors[name] = tensors.bytes / bench.bandwidth
        wanted = tensors.wanted() if name == "us" else None
        for shape in shapes if name == "us" else list(measured):
            if wanted is not None and not tensors.holds(shape, wanted):
                print(f"{heads} x {rows} {shape}: wrong")
                continue
            measured.setdefault(shape, {})[name] = tensors.time(shape)
        if name == "us":
            # what is slow here need not be measured elsewhere
            least = min(times["us"] for times in measured.values())
            measured = {shape: times for shape, times in measured.items() if times["us"] < 1.3 * least}
    chosen = min(measured, key=lambda shape: math.prod(measured[shape].values()) * measured[shape]["us"])
    row: Row = {"rows": rows, "kv_heads": heads.kv, "share": heads.query // heads.kv, "head_dim": heads.size}
    row |= {"kv_bytes": 2, **chosen._asdict()}
    row |= {name: round(1e6 * value, 2) for name, value in measured[chosen].items()}
    return row | {
        name.replace("us", "floor"): round(floors[name] / value, 3) for name, value in measured[chosen].items()
    }


def merge(kept: Sequence[Any], found: Sequence[Row]) -> list[Row]:
    """The table: what is new instead of what was there for the same shape, in the old order."""
    rows = {tuple(row[key] for key in KEYS): dict(row) for row in kept}
    return list((rows | {tuple(row[key] for key in KEYS): row for row in found}).values())


def run(bench: Bench, most_rows: int = BATCHES[-1]) -> list[Tuned]:
    until = min(bench.deadline, time.monotonic() + LIMIT_S)
    models = list(dict.fromkeys(Heads(model.heads, model.kv_heads, model.head_dim) for model in MODELS))
    shapes, shapes_of_few = candidates(bench.device), candidates_of_few(bench.device)
    batches = [rows for rows in BATCHES if rows <= most_rows]
    buckets = [bucket for bucket in (16, 64, 256, 512) if bucket <= max(FEW, batches[-1])]
    if most_rows <= FEW:
        shapes = [shape for shape in shapes if shape[:3] in GEOMETRY_BESIDE and shape.fused == shapes[0].fused]
    # a compiled kernel serves a bucket of rows; the default and its like come first
    tasks = [Task(heads, FEW, shape) for shape in shapes_of_few for heads in models]
    tasks += [Task(heads, rows, shape) for shape in shapes for rows in buckets for heads in models]
    free = torch.cuda.mem_get_info()[0]
    size = min(int(0.7 * free), 5 << 30) // 2
    pool = torch.empty(size, dtype=torch.bfloat16, device=bench.device).normal_()
    good = compile_all(bench, tasks, time.monotonic() + 0.5 * (until - time.monotonic()))
    found: list[Row] = []
    for heads in models:
        for rows in batches:
            if time.monotonic() > until:
                print(f"{heads} x {rows}: no time left")
                continue
            bucket = next(bucket for bucket in buckets if rows <= bucket)
            eligible = [*shapes_of_few, *shapes] if rows <= FEW else shapes
            usable = [shape for shape in eligible if Task(heads, bucket, shape) in good]
            wanted = [variant for shape in usable for variant in variants(shape, rows, heads.kv)]
            found.append(best(bench, heads, rows, wanted, pool))
    return [Tuned("paged_attention", merge(tuned.table("paged_attention", bench.device), found))]


SECTION = Section("attention", ("paged_attention",), run)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tunes decode attention alone and renews its table.")
    parser.add_argument("--most-rows", type=int, default=FEW, choices=BATCHES, help="the largest batch measured")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds")
    parser.add_argument("--out", type=Path, default=tuned.FOLDER, help="folder for the table")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    name, start = torch.cuda.get_device_name(device), time.monotonic()
    gc.freeze()  # each capture of a graph collects garbage
    workers = max(1, (os.cpu_count() or 2) - 2)
    bandwidth = H200_READ if "H200" in name else read_bandwidth()
    bench = Bench(device, start + options.budget, bandwidth, workers, frozenset())
    (result,) = run(bench, options.most_rows)
    made = f"{name}, torch {torch.__version__}, python -m benchmarks.tune_attention, {time.strftime('%Y-%m-%d')}"
    for row in result.rows:
        if row["rows"] <= options.most_rows:
            print(row)
    print(
        tuned.write(result.op, tuned.arch(device), made, result.rows, options.out), f"{time.monotonic() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
