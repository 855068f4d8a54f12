"""The prefill attention kernel alone on a GPU: right first, then fast, then which tile is fastest.

`python -m benchmarks.prefill_attention [--json OUT] [--keep-table]` holds every case against float32, tries the TILES,
writes the best into services/worker/kernels/tuned/prefill_attention.<arch>.json, and times all cases with it next to
torch's own attention on contiguous tensors. Less than a minute on an H200.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from triton.runtime.errors import OutOfResources

from benchmarks.report import Result, report
from benchmarks.tuning import seconds
from services.worker.kernels import tuned
from services.worker.kernels.gpu_arch import arch_of
from services.worker.kernels.impl.triton._prefill_attention import (
    SHORT,
    Tile,
    choose_tile,
    forget_choices,
    launch,
    prefill,
)
from services.worker.kernels.impl.triton._prefill_parts import choose_splits, expected_blocks
from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec

PAGE = 16
LIMIT = 1e-2  # relative, of the norm; bfloat16 keeps 8 bits of weights and results
SAMPLES = 24  # tokens of a row that are checked
TILES = {
    64: (
        Tile(128, 64, 8, 3),
        Tile(128, 128, 8, 2),
        Tile(128, 128, 8, 3),
        Tile(128, 64, 4, 3),
        Tile(128, 64, 4, 2),
        Tile(64, 64, 4, 3),
        Tile(64, 128, 4, 2),
        Tile(256, 64, 8, 3),
        Tile(256, 64, 16, 3),
    ),
    128: (
        Tile(128, 64, 8, 3),
        Tile(128, 64, 8, 4),
        Tile(128, 64, 8, 2),
        Tile(128, 128, 8, 2),
        Tile(128, 128, 8, 3),
        Tile(128, 32, 8, 4),
        Tile(128, 32, 8, 3, 128),
        Tile(256, 32, 16, 3),
        Tile(256, 64, 16, 2),
        Tile(256, 64, 8, 2),
        Tile(64, 64, 4, 3),
        Tile(64, 32, 4, 4),
        Tile(64, 64, 4, 2),
    ),
}


class Load(NamedTuple):
    """Rows of one step: new tokens and context of each. `tuned`: the tiles are chosen by it."""

    name: str
    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    tuned: bool = False


class Heads(NamedTuple):
    queries: int
    keys: int
    size: int

    def __str__(self) -> str:
        return f"{self.queries}/{self.keys} x {self.size}"


LOADS = (
    Load("16 x 512", (512,) * 16, (512,) * 16, tuned=True),
    Load("4 x 2048", (2048,) * 4, (2048,) * 4, tuned=True),
    Load("1 x 8192", (8192,), (8192,), tuned=True),
    Load("2048 on 30000", (2048,), (32048,), tuned=True),
    Load("512 on 100000", (512,), (100512,)),
    Load("2048 on 98000", (2048,), (100048,)),
    Load("64 decode + 2048", (1,) * 64 + (2048,), (640,) * 64 + (2048,)),
)
TUNED_WITH = {64: Heads(9, 3, 64), 128: Heads(16, 8, 128)}
HEADS = (Heads(16, 8, 128), Heads(32, 8, 128), Heads(32, 4, 128), Heads(9, 3, 64))


class Problem:
    """One load's tensors, with the pages scattered over the cache."""

    def __init__(self, load: Load, heads: Heads, device: torch.device) -> None:
        self.load, self.heads = load, heads
        generator = torch.Generator(device=device).manual_seed(1)
        needed = [-(-context // PAGE) for context in load.contexts]
        pool = torch.randperm(sum(needed), generator=generator, device=device).to(torch.int32)
        tables = torch.zeros(len(needed), max(needed), dtype=torch.int32, device=device)
        for row, part in enumerate(torch.split(pool, needed)):
            tables[row, : len(part)] = part
        shape = (len(pool), PAGE, heads.keys, heads.size)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

        self.k, self.v, self.q = normal(*shape), normal(*shape), normal(sum(load.counts), heads.queries, heads.size)
        self.out = torch.full_like(self.q, torch.nan)
        starts = [sum(load.counts[:row]) for row in range(len(load.counts) + 1)]
        self.rows = AttentionRows(
            query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
            context_lens=torch.tensor(load.contexts, dtype=torch.int32, device=device),
            block_tables=tables,
            block_tokens=PAGE,
            max_query=max(load.counts),
            max_context=max(load.contexts),
        )
        self.spec = AttentionSpec(heads.size**-0.5)

    @property
    def flops(self) -> float:
        seen = sum(n * (c - n) + n * (n + 1) // 2 for n, c in zip(self.load.counts, self.load.contexts, strict=True))
        return 4.0 * seen * self.heads.queries * self.heads.size

    @property
    def tile(self) -> Tile:
        """As the table has it."""
        share = self.heads.queries // self.heads.keys
        short = self.rows.max_context <= SHORT
        return choose_tile(self.q.device, self.q.dtype, self.k.dtype, self.heads.size, share, short)

    def splits(self, tile: Tile) -> int:
        block_q = tile.block_m // (self.heads.queries // self.heads.keys)
        programs = expected_blocks(len(self.q), len(self.load.counts), block_q) * self.heads.keys
        part_bytes = self.q.numel() * 4
        return choose_splits(programs, self.rows.max_context, part_bytes, self.q.device)

    def run(self, tile: Tile | None = None, splits: int | None = None) -> None:
        """As the worker would, or with the choices made."""
        if tile is None:
            prefill(self.q, self.out, self.k, self.v, self.rows, self.spec, 0, 0)
        else:
            splits = self.splits(tile) if splits is None else splits
            launch(self.q, self.out, self.k, self.v, self.rows, self.spec, 0, 0, tile, splits)

    def contiguous(self, row: int) -> tuple[Tensor, Tensor]:
        """The row's keys and values: [context, K, D]."""
        context = self.load.contexts[row]
        blocks = self.rows.block_tables[row, : -(-context // PAGE)].long()
        return self.k[blocks].flatten(0, 1)[:context], self.v[blocks].flatten(0, 1)[:context]

    def by_key_head(self, x: Tensor) -> Tensor:
        """[n, H, D] as float32 [K, H / K, n, D]."""
        share = self.heads.queries // self.heads.keys
        return x.float().view(-1, self.heads.keys, share, self.heads.size).permute(1, 2, 0, 3)

    def error(self) -> float:
        """The largest relative error of a sampled token's heads, against float32."""
        worst, start = 0.0, 0
        for row, (count, context) in enumerate(zip(self.load.counts, self.load.contexts, strict=True)):
            if row % 16 == 0 or count > 1:
                k, v = (part.float().transpose(0, 1) for part in self.contiguous(row))
                token = torch.linspace(0, count - 1, min(count, SAMPLES), device=self.q.device).long()
                q = self.by_key_head(self.q[start + token])
                scores = q @ k[:, None].transpose(2, 3) * self.spec.scale
                position = context - count + token
                hidden = torch.arange(context, device=self.q.device) > position[:, None]
                wanted = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, None]
                difference = (self.by_key_head(self.out[start + token]) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
                worst = max(worst, float(difference.nan_to_num(math.inf).max()))
            start += count
        return worst

    def peers(self) -> dict[str, Callable[[], Tensor]]:
        """torch's kernels on contiguous tensors with one key head per query head; rows must be alike."""
        if len(set(self.load.counts)) > 1:
            return {}
        share = self.heads.queries // self.heads.keys
        pairs = [self.contiguous(row) for row in range(len(self.load.counts))]
        k, v = (
            torch.stack(parts).transpose(1, 2).repeat_interleave(share, 1).contiguous()
            for parts in zip(*pairs, strict=True)
        )
        q = self.q.view(len(pairs), -1, *self.q.shape[1:]).transpose(1, 2).contiguous()

        def attention(backend: SDPBackend) -> Callable[[], Tensor]:
            mask = None if q.shape[2] == k.shape[2] else causal_lower_right(q.shape[2], k.shape[2])

            def run() -> Tensor:
                with sdpa_kernel(backend):
                    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

            return run

        found = {"flash": attention(SDPBackend.FLASH_ATTENTION)}
        if q.shape[2] == k.shape[2]:
            found["cudnn"] = attention(SDPBackend.CUDNN_ATTENTION)
        return found


def warm(choices: Sequence[tuple[Problem, Tile, int]], console: Console) -> list[bool]:
    """Compiles in threads; which choices fit the device."""

    def fits(choice: tuple[Problem, Tile, int]) -> bool:
        problem, tile, splits = choice
        try:
            problem.run(tile, splits)
        except OutOfResources:
            console.print(f"  {tuple(tile)} does not fit", markup=False)
            return False
        return True

    with ThreadPoolExecutor(len(choices)) as pool:
        return list(pool.map(fits, choices))


def wrong(problem: Problem, tile: Tile | None, splits: int | None, console: Console) -> bool:
    problem.out.fill_(torch.nan)
    problem.run(tile, splits)
    error = problem.error()
    if error < LIMIT:
        return False
    console.print(
        f"WRONG: {problem.load.name}, {problem.heads}, {tile}, {splits} splits: error {error:.3g}", style="red"
    )
    return True


def tune(head_dim: int, device: torch.device, console: Console) -> tuple[list[dict[str, float]], bool]:
    """The rows of the table, and whether all tiles were right."""
    heads = TUNED_WITH[head_dim]
    problems = [Problem(load, heads, device) for load in LOADS if load.tuned]
    fits = warm([(problems[0], tile, 1) for tile in TILES[head_dim]], console)
    tiles = [tile for tile, fit in zip(TILES[head_dim], fits, strict=True) if fit]
    found_wrong = [tile for problem in problems for tile in tiles if wrong(problem, tile, 1, console)]
    rates: dict[bool, dict[Tile, float]] = {True: {}, False: {}}
    names = ", ".join(problem.load.name for problem in problems)
    console.print(f"{heads}: TFLOP/s at {names}", markup=False)
    for tile in tiles:
        each = [problem.flops / seconds([partial(problem.run, tile, 1)]) * 1e-12 for problem in problems]
        for short in rates:
            some = [rate for rate, p in zip(each, problems, strict=True) if (p.rows.max_context <= SHORT) == short]
            rates[short][tile] = math.prod(some) ** (1 / len(some))
        text = " ".join(f"{rate:6.0f}" for rate in each)
        console.print(f"  {tuple(tile)!s:24} {text}   mean of long {rates[False][tile]:.0f}", markup=False)
    rows = []
    for short, found in rates.items():
        best = max(found, key=found.__getitem__)
        console.print(f"  best for {'short' if short else 'long'}: {tuple(best)}", markup=False)
        row = {"head_dim": head_dim, "kv_bytes": 2, "short": short, **best._asdict(), "tflops": round(found[best], 1)}
        rows.append(row)
    return rows, not found_wrong


def compare(load: Load, heads: Heads, device: torch.device, conditions: str, console: Console) -> list[Result] | None:
    """One load's figures with the table's tile; None where it is wrong."""
    problem = Problem(load, heads, device)
    tile = problem.tile
    splits = problem.splits(tile)
    if wrong(problem, None, None, console) or wrong(problem, tile, 3, console):
        return None
    name = f"prefill_attention {load.name} {heads}"
    ours = seconds([problem.run])
    results = [
        Result(name, problem.flops / ours * 1e-12, "TFLOP/s", conditions),
        Result(f"{name} time", ours * 1e6, "us", conditions),
    ]
    texts = [f"{name}: {results[0].value:.0f} TFLOP/s, {ours * 1e6:.0f} us, {splits} splits"]
    if splits > 1:
        texts.append(f"unsplit {seconds([lambda: problem.run(tile, 1)]) * 1e6:.0f} us")
    for peer, run in problem.peers().items():
        try:
            rate = problem.flops / seconds([run]) * 1e-12
        except RuntimeError:  # torch has no such kernel for these arguments
            continue
        results.append(Result(f"{name} torch {peer}", rate, "TFLOP/s", conditions))
        texts.append(f"{peer} {rate:.0f}")
    console.print("; ".join(texts), markup=False)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="OUT")
    parser.add_argument("--keep-table", action="store_true", help="only measure, with the table as it is")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    console = Console(highlight=False, width=140)
    device = torch.device("cuda", torch.cuda.current_device())
    start_s = time.monotonic()
    conditions = (
        f"{torch.cuda.get_device_name(device)}, bfloat16, pages of {PAGE}, scattered, torch {torch.__version__}"
    )
    right = True
    if not arguments.keep_table:
        entries: list[dict[str, float]] = []
        for head_dim in TILES:
            found, fine = tune(head_dim, device, console)
            entries += found
            right &= fine
        if right:
            made = f"python -m benchmarks.prefill_attention; {conditions}"
            path = tuned.write("prefill_attention", arch_of(device), made, entries)
            console.print(f"written: {path}, after {time.monotonic() - start_s:.0f} s", markup=False)
        tuned.read.cache_clear()
        forget_choices()
    small = [Problem(LOADS[0], heads, device) for heads in HEADS]
    warm([(problem, problem.tile, splits) for problem in small for splits in (1, 3)], console)
    results: list[Result] = []
    for heads in HEADS:
        for load in LOADS:
            figures = compare(load, heads, device, conditions, console)
            right &= figures is not None
            results += figures or []
    if not right:
        console.print("RED: no figure counts", style="bold red")
        return 1
    report(results, arguments.json, "prefill attention")
    console.print(f"{time.monotonic() - start_s:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
