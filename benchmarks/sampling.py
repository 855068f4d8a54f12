"""From logits to tokens on a GPU: each sampling op against its bytes' floor and against torch's way.

    python -m benchmarks.sampling [--only draw] [--rows 1,64] [--vocab 151936] [--set PICK_WARPS=1] [--json OUT]

First every op is held against its meaning. Then each is timed inside a replayed graph on logits that lie where the head
leaves them: in the cache as far as they fit. `peaked` logits are like a trained model's (few tokens have the mass),
`flat` ones like random weights'.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.gate import check
from benchmarks.peers import BANDWIDTH
from benchmarks.tuning import seconds
from services.worker.kernels.impl.triton import (
    _floors,
    _sampling,
    argmax,
    draw,
    keep_floor,
    penalize,
    sample,
    top_k_floor,
    top_p_floor,
)
from services.worker.kernels.impl.triton._sampling import tokens

VOCABS = (151936, 128256)  # Qwen3, Llama 3
ROWS = (1, 16, 64, 256, 512)
MODULES = (argmax, draw, keep_floor, penalize, sample, top_k_floor, top_p_floor)
TOP_K, TOP_P, MIN_P, TEMPERATURE = 50, 0.95, 0.05, 0.8


class Way(NamedTuple):
    """One measured call. `num_bytes`: what it must read and write at least; 0 for torch's ways."""

    name: str
    run: Callable[[], object]
    num_bytes: float = 0.0
    torch_run: Callable[[], object] | None = None


class Figure(NamedTuple):
    name: str
    vocab: int
    rows: int
    us: float
    percent: float  # of the time that the bytes take at full bandwidth
    torch_us: float


class Inputs(NamedTuple):
    """Tensors of one step on the device: V tokens, S rows."""

    flat: Tensor  # bf16 [S, V]
    peaked: Tensor  # bf16 [S, V]
    temperature: Tensor
    seeds: Tensor
    positions: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def make_inputs(rows: int, vocab: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(rows)
    flat = torch.randn(rows, vocab, generator=generator, device=device) * 1.5
    peaked = torch.randn(rows, vocab, generator=generator, device=device) * 2.5
    best = torch.randint(vocab, (rows, 40), generator=generator, device=device)
    peaked.scatter_(1, best, 12 + 3 * torch.randn(rows, 40, generator=generator, device=device))

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    return Inputs(
        flat.bfloat16(),
        peaked.bfloat16(),
        column(TEMPERATURE),
        torch.randint(-(2**62), 2**62, (rows,), generator=generator, device=device),
        torch.arange(rows, device=device),
        column(TOP_K, torch.int64),
        column(TOP_P),
        column(MIN_P),
    )


def gumbel(logits: Tensor, temperature: Tensor) -> Tensor:
    """The common draw in torch: exponential numbers, one per probability."""
    probabilities = (logits.float() / temperature[:, None]).softmax(-1)
    return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(-1)


def sorted_draw(logits: Tensor, given: Inputs) -> Tensor:
    """The common draw in torch with top-k and top-p: sorts the vocabulary."""
    ordered, place = (logits.float() / given.temperature[:, None]).sort(-1, descending=True)
    ordered[:, TOP_K:] = -torch.inf
    probabilities = ordered.softmax(-1)
    probabilities.masked_fill_(probabilities.cumsum(-1) - probabilities > given.top_p[:, None], 0.0)
    chosen = probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)
    return place.gather(1, chosen)


def limited_draw(logits: Tensor, given: Inputs) -> Tensor:
    """Ours, with all three limits."""
    floor = keep_floor.IMPL.run(logits, given.temperature, given.top_k, given.top_p, given.min_p, TOP_K)
    return sample.IMPL.run(logits, given.temperature, floor, given.seeds, given.positions)


def draws(given: Inputs) -> Iterator[Way]:
    """Greedy, and draws without limits."""
    rows, vocab = given.flat.shape
    counter = torch.zeros(rows, dtype=torch.int32, device=given.flat.device)
    greedy = torch.zeros_like(given.temperature)
    place = (given.seeds, given.positions)
    size = 2 * rows * vocab
    yield Way(
        "draw",
        lambda: draw.IMPL.run(given.flat, given.temperature, *place),
        size,
        lambda: gumbel(given.flat, given.temperature),
    )
    yield Way("draw, one launch", lambda: tokens(given.flat, given.temperature, None, *place, counter), size)
    yield Way(
        "draw, all greedy",
        lambda: draw.IMPL.run(given.flat, greedy, *place),
        size,
        lambda: given.flat.argmax(-1),
    )
    wide = given.flat.float()
    yield Way("argmax fp32", lambda: argmax.IMPL.run(wide), 2 * size, lambda: wide.argmax(-1))
    floor = torch.full_like(given.temperature, -torch.inf)
    yield Way(
        "sample fp32",
        lambda: sample.IMPL.run(wide, given.temperature, floor, *place),
        2 * size,
        lambda: gumbel(wide, given.temperature),
    )


def limits(given: Inputs) -> Iterator[Way]:
    """Floors of top-k, top-p and min-p, and the whole draw with them."""
    size = 2 * given.flat.numel()
    temperature, top_k, top_p, min_p = given.temperature, given.top_k, given.top_p, given.min_p
    none_k, none_p, none_m = torch.zeros_like(top_k), torch.ones_like(top_p), torch.zeros_like(min_p)
    for name, logits in (("flat", given.flat), ("peaked", given.peaked)):
        wide = logits.float()
        yield Way(
            f"top_k_floor fp32 {name}",
            partial(top_k_floor.IMPL.run, wide, temperature, top_k, top_p, TOP_K),
            2 * size,
            partial(wide.topk, TOP_K, -1),
        )
        yield Way(
            f"top_p_floor fp32 {name}",
            partial(top_p_floor.IMPL.run, wide, temperature, top_p),
            2 * size,
            partial(top_p_floor.IMPL.op.meaning, wide, temperature, top_p),
        )
        for limit, arguments in (
            ("k", (top_k, none_p, none_m, TOP_K)),
            ("p", (none_k, top_p, none_m, 0)),
            ("k p m", (top_k, top_p, min_p, TOP_K)),
        ):
            yield Way(
                f"keep_floor {limit} {name}",
                partial(keep_floor.IMPL.run, logits, temperature, *arguments),
                size,
            )
        yield Way(
            f"draw with k p m {name}", partial(limited_draw, logits, given), size, partial(sorted_draw, logits, given)
        )


def penalties(given: Inputs) -> Iterator[Way]:
    rows, vocab = given.flat.shape
    device = given.flat.device
    logits = given.flat.float()
    index = torch.arange(rows, device=device)
    in_output = torch.zeros(rows, vocab, dtype=torch.int32, device=device)
    in_output[:, ::100] = 1
    in_prompt = torch.zeros(rows, vocab, dtype=torch.bool, device=device)
    arguments = (logits, index, index, in_output, in_prompt, given.min_p, given.min_p, given.top_p)
    yield Way(
        "penalize",
        partial(penalize.IMPL.run, *arguments),
        (4 + 4 + 4 + 1) * rows * vocab,
        partial(penalize.IMPL.op.meaning, *arguments),
    )


def measure(rows: int, vocab: int, device: torch.device, only: str) -> Iterator[Figure]:
    given = make_inputs(rows, vocab, device)
    for part in (draws, limits, penalties):
        for way in part(given):
            if only not in way.name:
                continue
            us = seconds([way.run] * 4, 0.003) * 1e6
            torch_us = seconds([way.torch_run], 0.002) * 1e6 if way.torch_run is not None else 0.0
            yield Figure(way.name, vocab, rows, us, 100 * way.num_bytes / BANDWIDTH * 1e6 / us, torch_us)


def show(console: Console, figures: list[Figure], vocab: int, rows: list[int]) -> None:
    """One line per op; for each number of rows the time, the share of the floor, and torch's time over it."""
    table = Table(title=f"vocabulary {vocab}: us, % of the bytes' floor, torch's time over ours")
    table.add_column("", no_wrap=True)
    for count in rows:
        table.add_column(f"{count} rows", justify="right", no_wrap=True)
    for name in dict.fromkeys(figure.name for figure in figures):
        found = {figure.rows: figure for figure in figures if (figure.name, figure.vocab) == (name, vocab)}
        cells = [
            f"{f.us:.1f} {f.percent:.0f}%" + (f" {f.torch_us / f.us:.1f}x" if f.torch_us else "")
            for f in (found[count] for count in rows)
        ]
        table.add_row(name, *cells)
    console.print(table)


def change(name: str, value: str) -> None:
    """Another launch geometry, for trials; what turns out best belongs into the kernels' files."""
    owners = [module for module in (_sampling, _floors) if isinstance(getattr(module, name, None), int)]
    if not owners:
        raise SystemExit(f"no launch geometry has {name}")
    for owner in owners:
        setattr(owner, name, int(value))


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only the lines whose name contains this")
    parser.add_argument("--rows", type=numbers, default=list(ROWS))
    parser.add_argument("--vocab", type=numbers, default=list(VOCABS))
    parser.add_argument("--json", help="all figures as a list of objects")
    parser.add_argument("--set", action="append", default=[], help="another launch geometry: NAME=NUMBER, see below")
    parser.epilog = "CHUNK, PER_PROGRAM, MANY_ROWS, PICK_WARPS of all; TILE, PIVOTS, WARPS of the floors"
    options = parser.parse_args()
    for setting in options.set:
        change(*setting.split("="))
    device = torch.device("cuda", torch.cuda.current_device())
    console = Console(width=140, highlight=False)
    impls: list[Any] = [module.IMPL for module in MODULES]
    cases = sum(check(impl, device, dtype) for impl in impls for dtype in (torch.float32, torch.bfloat16))
    console.print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}: {cases} cases equal the meaning")
    figures: list[Figure] = []
    for vocab in options.vocab:
        for rows in options.rows:
            figures += measure(rows, vocab, device, options.only)
        show(console, [figure for figure in figures if figure.vocab == vocab], vocab, options.rows)
    if options.json:
        Path(options.json).write_text(json.dumps([figure._asdict() for figure in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
