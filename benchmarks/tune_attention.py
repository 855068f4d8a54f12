"""Layout of decode attention: every benchmarked model's heads, some batch sizes, short, long and uneven contexts.

The launcher knows the number of rows and not their contexts, so a row of the table serves all contexts measured at that
size: the choice with the least product of times, short ones counting double. KV lies in scattered blocks, in more
memory than L2 holds.
"""

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from benchmarks.shapes import MODELS
from benchmarks.tuning import Bench, Row, Section, Tuned, seconds
from services.worker.kernels.impl.triton._decode_attention import Shape, default_shape, launch, small_lds
from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec, paged_attention

LIMIT_S = 55.0  # of the tuner's budget
PAGE = 16
ROTATED = 200 << 20  # bytes of KV between two uses of the same
MOST_LAUNCHES = 64
SHORT, LONG, LONGEST = 640, 8192, 100_000
BATCHES = (1, 4, 8, 16, 64, 256, 512)
WAVES = (0.5, 1.0, 2.0, 3.0, 4.0)
FEW_ROWS = 16  # up to which joining many short parts can take longer than fewer parts would
LEAST = (1, 2, 3, 4)
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
    """Without `waves` and `least`, for which nothing is compiled."""
    fused = torch.version.hip is None
    shapes = [Shape(*geometry, waves=2.0, fused=fused) for geometry in GEOMETRY]
    if fused:
        shapes += [shape._replace(fused=False) for shape in shapes[:2]]
    default = default_shape(2, 2, 128, small_lds(device))
    return [default, *(shape for shape in shapes if shape != default)]


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

    def run(self, shape: Shape, rows: AttentionRows) -> None:
        launch(self.q, self.out, self.k, self.v, rows, self.spec, shape)

    def holds(self, shape: Shape, wanted: Tensor) -> bool:
        self.out.fill_(torch.nan)
        self.run(shape, self.batches[0])
        return torch.allclose(self.out, wanted, rtol=2e-2, atol=3e-3)

    def wanted(self) -> Tensor:
        return paged_attention.meaning(self.q, self.k, self.v, self.batches[0], self.spec)

    def time(self, shape: Shape) -> float:
        def one(rows: AttentionRows) -> Callable[[], None]:
            return lambda: self.run(shape, rows)

        rounds = math.ceil(10 / len(self.batches)) if self.bytes < 100 << 20 else 1
        return seconds([one(rows) for _ in range(rounds) for rows in self.batches], span_s=0.002)


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


def run(bench: Bench) -> list[Tuned]:
    until = min(bench.deadline, time.monotonic() + LIMIT_S)
    models = list(dict.fromkeys(Heads(model.heads, model.kv_heads, model.head_dim) for model in MODELS))
    shapes = candidates(bench.device)
    # a compiled kernel serves a bucket of rows; the default and its like come first
    tasks = [Task(heads, rows, shape) for shape in shapes for rows in (16, 64, 256, 512) for heads in models]
    free = torch.cuda.mem_get_info()[0]
    size = min(int(0.7 * free), 5 << 30) // 2
    pool = torch.empty(size, dtype=torch.bfloat16, device=bench.device).normal_()
    good = compile_all(bench, tasks, time.monotonic() + 0.5 * (until - time.monotonic()))
    found: list[Row] = []
    for heads in models:
        for rows in BATCHES:
            if time.monotonic() > until:
                print(f"{heads} x {rows}: no time left")
                continue
            bucket = next(bucket for bucket in (16, 64, 256, 512) if rows <= bucket)
            usable = [shape for shape in shapes if Task(heads, bucket, shape) in good]
            waves = WAVES if rows * heads.kv < 1024 else (2.0,)
            least = LEAST if rows <= FEW_ROWS else (1,)
            layouts = [s._replace(waves=w, least=n) for s in usable for w in waves for n in least]
            found.append(best(bench, heads, rows, layouts, pool))
    return [Tuned("paged_attention", found)]


SECTION = Section("attention", ("paged_attention",), run)
