"""What sparse attention's choice costs a layer on a GPU: scores, and the best of them as slots, beside torch's topk.

    python -m benchmarks.index_choice [--rows 1,16,64] [--contexts 500,4096,32768,130000] [--max-len N] [--json OUT]

Sizes are DeepSeek-V3.2's (64 index heads of 128, 2,048 tokens chosen). As in a replayed step, tensors are as wide as
the longest context that is allowed, whatever the contexts are. First the kernels are held against their meanings, at
these sizes too; then all is timed inside a replayed graph. `parts` are the kernels of `index_best`, by the profiler.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.gate import check
from benchmarks.peers import BANDWIDTH
from benchmarks.tuning import seconds
from services.worker.kernels.impl.triton import index_best, index_scores
from services.worker.kernels.ops.paged_attention import AttentionRows

TOP_K, HEADS, DIM, ROW, PAGE = 2048, 64, 128, 704, 16
POOL = 1 << 17  # tokens whose keys are there: rows share blocks, so that they fit
PROFILED = 20  # calls


@dataclass(frozen=True)
class Figure:
    """Microseconds. `topk_us`: of torch's topk over all columns with the look-up of the slots."""

    rows: int
    context: int
    max_len: int
    scores_us: float
    best_us: float
    floor_us: float  # each score once and the slots, from memory
    topk_us: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    weights: Tensor
    pages: Tensor
    rows: AttentionRows
    scores: Tensor  # behind contexts -inf, which topk needs


def make_inputs(rows: int, context: int, max_len: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(rows + context)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    tables = torch.randint(POOL // PAGE, (rows, max_len // PAGE), generator=generator, device=device, dtype=torch.int32)
    made = AttentionRows(
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
        block_tables=tables,
        block_tokens=PAGE,
        max_query=1,
        max_context=max_len,
        num_decode=rows,
        table_rows=torch.arange(rows, dtype=torch.int32, device=device),
    )
    q, pages = random(rows, HEADS, DIM).bfloat16(), random(POOL // PAGE, PAGE, ROW).bfloat16()
    scores = torch.full((rows, max_len), -torch.inf, device=device)
    given = Inputs(q, random(rows, HEADS), pages, made, scores)
    index_scores.IMPL.run(q, given.weights, pages, made, scores, 0)
    return given


def by_topk(scores: Tensor, rows: AttentionRows) -> Tensor:
    """The best first."""
    assert rows.table_rows is not None
    best = scores.topk(TOP_K, dim=-1).indices
    block = rows.block_tables[rows.table_rows[:, None].long(), best // rows.block_tokens]
    return (block * rows.block_tokens + best % rows.block_tokens).to(torch.int32)


def parts_of(scores: Tensor, rows: AttentionRows) -> dict[str, float]:
    """Microseconds of each kernel of a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            index_best.IMPL.run(scores, rows, TOP_K)
        torch.cuda.synchronize()
    found = profile.key_averages()
    return {e.key: e.self_device_time_total / e.count for e in found if e.key.startswith("index_")}


def measure(rows: int, context: int, max_len: int, device: torch.device) -> Figure:
    given = make_inputs(rows, context, max_len, device)
    scores, made = given.scores, given.rows
    wanted = index_best.IMPL.op.meaning(scores, made, TOP_K)
    if not torch.equal(index_best.IMPL.run(scores, made, TOP_K), wanted):
        raise SystemExit(f"index_best is wrong for {rows} rows of {context} tokens")
    scored = (given.q, given.weights, given.pages, made, scores, TOP_K)
    size = 4 * rows * (context if context > TOP_K else 0) + 4 * rows * TOP_K
    return Figure(
        rows,
        context,
        max_len,
        scores_us=1e6 * seconds([lambda: index_scores.IMPL.run(*scored)] * 4),
        best_us=1e6 * seconds([lambda: index_best.IMPL.run(scores, made, TOP_K)] * 4),
        floor_us=1e6 * size / BANDWIDTH,
        topk_us=1e6 * seconds([lambda: by_topk(scores, made)] * 4),
        parts=parts_of(scores, made),
    )


def lines(figures: list[Figure]) -> Iterator[tuple[str, ...]]:
    for f in figures:
        parts = ", ".join(f"{name.removeprefix('index_')} {us:.1f}" for name, us in f.parts.items())
        times = (f"{us:.1f}" for us in (f.scores_us, f.best_us, f.floor_us, f.topk_us))
        yield str(f.rows), f"{f.context:,}", *times, f"{f.topk_us / f.best_us:.1f}", parts


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=numbers, default=[1, 16, 64])
    parser.add_argument("--contexts", type=numbers, default=[500, 4096, 32768, 130000])
    parser.add_argument("--max-len", type=int, default=163840, help="columns of the scores")
    parser.add_argument("--json", help="all figures as a list of objects")
    options = parser.parse_args()
    device, console = torch.device("cuda", torch.cuda.current_device()), Console(width=140, highlight=False)
    cases = check(index_best.IMPL, device, torch.float32) + check(index_scores.IMPL, device, torch.bfloat16)
    console.print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}: {cases} cases equal the meaning")
    figures = [measure(rows, n, options.max_len, device) for rows in options.rows for n in options.contexts]
    table = Table(title=f"A layer's choice, {options.max_len:,} columns: us")
    for column in ("rows", "context", "scores", "index_best", "floor", "topk", "topk / ours", "parts"):
        table.add_column(column, justify="left" if column == "parts" else "right")
    for line in lines(figures):
        table.add_row(*line)
    console.print(table)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
