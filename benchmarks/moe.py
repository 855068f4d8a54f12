"""Mixture of experts on a GPU: correctness, then launch geometry measured and kept, then times against the floors.

    python -m benchmarks.moe [--model WORD,WORD] [--tokens 1,4,16] [--no-tune] [--out FOLDER] [--json OUT]

Weights rotate between several layers, so that they come from memory as in a step. Kernels compile in several
processes. The table (services/worker/kernels/tuned/moe_gated.<arch>.json, or FOLDER's) is what moe_gated chooses by.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.errors import TritonError

from benchmarks.gate import check
from benchmarks.kernel_time import Ceilings, ceilings, per_call_us
from services.worker.kernels import tuned
from services.worker.kernels.gpu_arch import arch_of
from services.worker.kernels.impl.triton import _moe_plan, moe_gated, moe_route, norm_route
from services.worker.kernels.impl.triton._moe_plan import Experts, Few, Grouped, Tile
from services.worker.kernels.impl.triton._moe_sort import Sorted
from services.worker.kernels.ops.moe_gated import moe_gated as gated_op

MODELS = {
    "qwen3-30b-a3b": Experts(128, 8, 2048, 768),
    "mixtral-8x7b": Experts(8, 2, 4096, 14336),
    "gpt-oss-20b": Experts(32, 4, 2880, 2880),
    "glm-4.5-air": Experts(128, 8, 4096, 1408),
    "deepseek-v3": Experts(256, 8, 7168, 2048),
    "mimo-v2-flash": Experts(256, 8, 4096, 2048),
    "qwen3-next": Experts(512, 10, 2048, 512),
}
TOKENS = (1, 2, 4, 8, 16, 64, 256, 512, 2048, 8192)
MOST_LAYERS, LAYERS_BYTES = 4, 60 << 30
PROCESSES = 14
FEW_PAIRS = 128  # more are not tried without sorting
DTYPE = torch.bfloat16
UP_FEW = ((4, 1024, 4), (8, 1024, 4), (2, 1024, 4), (2, 2048, 4), (4, 2048, 8), (4, 512, 2), (2, 512, 1), (8, 512, 4))
# Rows, columns, warps, experts of a step: all of a token's with columns by their number, or a few with many.
DOWN_FEW = ((4, 1.0, 4), (2, 1.0, 2), (1, 1.0, 1), (8, 1.0, 8), (16, 1.0, 16), (4, 0.5, 4), (2, 2.0, 4), (1, 4.0, 4))
DOWN_LONG = (
    (4, 2048, 4, 1), (4, 1024, 4, 1), (8, 1024, 4, 1), (8, 512, 4, 1), (16, 512, 8, 1), (4, 512, 2, 1),
    (4, 1024, 4, 2), (2, 1024, 4, 2), (4, 512, 4, 2), (2, 1024, 4, 4), (4, 512, 4, 4), (2, 512, 4, 4),
)  # fmt: skip
UP_TILES = {
    16: ((64, 64, 1, 4, 4), (64, 64, 1, 4, 6), (64, 128, 1, 4, 3), (128, 64, 1, 4, 3), (128, 64, 1, 8, 4)),
    32: ((64, 64, 1, 4, 4), (64, 128, 1, 4, 3), (128, 64, 1, 8, 4), (128, 64, 4, 8, 3)),
    64: ((64, 64, 8, 4, 4), (64, 64, 8, 4, 4, 32), (128, 64, 8, 8, 4, 0, 1), (64, 64, 8, 4, 4, 0, 1)),
    128: (
        (128, 64, 4, 8, 4, 64), (128, 64, 8, 8, 4, 0, 1), (128, 64, 8, 8, 4, 64, 1), (128, 64, 4, 8, 4, 0, 1),
        (64, 64, 8, 4, 3, 64, 1),
    ),
    192: ((128, 64, 8, 8, 3, 64, 1), (128, 64, 8, 8, 4, 64, 1), (128, 64, 4, 8, 4, 64, 1)),
}  # fmt: skip
DOWN_TILES = {
    16: ((64, 128, 1, 4, 4), (64, 64, 1, 4, 6), (128, 64, 1, 4, 4), (128, 128, 1, 8, 3), (64, 256, 1, 4, 3)),
    32: ((64, 128, 1, 4, 4), (128, 64, 1, 4, 4), (128, 128, 1, 8, 3), (64, 64, 1, 4, 6)),
    64: ((128, 64, 8, 4, 4), (128, 64, 8, 4, 4, 32), (128, 64, 8, 8, 4), (256, 64, 8, 8, 4, 0, 2)),
    128: (
        (256, 64, 4, 8, 4, 64), (128, 64, 8, 4, 3, 64, 1), (256, 64, 8, 8, 4, 64, 1), (256, 64, 8, 8, 4, 0, 2),
        (256, 64, 8, 8, 3, 0, 2),
    ),
    192: ((256, 64, 8, 8, 4, 64, 1), (256, 64, 8, 8, 3, 64, 1), (256, 64, 8, 8, 3, 0, 2)),
}  # fmt: skip


class Layer(NamedTuple):
    """moe_gated's arguments for one layer and one batch."""

    x: Tensor
    weights: Tensor
    experts: Tensor
    gate_up: Tensor
    down: Tensor
    residual: Tensor


class Figure(NamedTuple):
    """Microseconds per call of the op, and of its parts where they were measured."""

    model: str
    tokens: int
    plan: Few | Grouped
    us: float
    up_us: float
    down_us: float
    route_us: float  # norm_route
    mlp_us: float  # norm_route and moe_gated, as a layer has them
    floor_us: float
    bound: str


def block_sizes(shape: Experts, num_tokens: int) -> list[int]:
    """Row blocks worth trying for so many tokens: about what an expert gets, or the largest."""
    mean = num_tokens * shape.top_k / shape.num_experts
    if mean <= 8:
        return [16]
    return [size for size in (16, 32, 64, 128, 192) if size / 3 <= mean <= size * 2] or [128, 192]


def few_downs(shape: Experts) -> list[tuple[int, int, int, int]]:
    """Of DOWN_FEW with columns in place of multiples of what makes tiles of all models equally large."""
    base, widest = 2048 // triton.next_power_of_2(shape.top_k), triton.next_power_of_2(shape.inner)
    together = [(rows, int(part * base), warps, 0) for rows, part, warps in DOWN_FEW]
    return together + [entry for entry in DOWN_LONG if entry[1] <= widest and entry[3] < shape.top_k]


def layers_of(shape: Experts) -> int:
    """Layers that weights rotate between."""
    size = 3 * shape.num_experts * shape.hidden * shape.inner * DTYPE.itemsize
    return max(2, min(MOST_LAYERS, LAYERS_BYTES // size))


def make_weights(shape: Experts, layers: int) -> list[tuple[Tensor, Tensor]]:
    """[E, 2I, N] and [E, N, I] per layer."""
    made = []
    for _ in range(layers):
        gate_up = torch.empty(shape.num_experts, 2 * shape.inner, shape.hidden, dtype=DTYPE, device="cuda")
        down = torch.empty(shape.num_experts, shape.hidden, shape.inner, dtype=DTYPE, device="cuda")
        made.append((gate_up.normal_(0, shape.hidden**-0.5), down.normal_(0, shape.inner**-0.5)))
    return made


def make_layers(shape: Experts, num_tokens: int, weights: Iterable[tuple[Tensor, Tensor]]) -> list[Layer]:
    layers = []
    for gate_up, down in weights:
        logits = torch.randn(num_tokens, shape.num_experts, device="cuda")
        shares, experts = moe_route.run(logits, shape.top_k, True)
        x, residual = torch.randn(2, num_tokens, shape.hidden, device="cuda").to(DTYPE).unbind(0)
        layers.append(Layer(x, shares, experts, gate_up, down, residual.contiguous()))
    return layers


def gate(shape: Experts, layer: Layer, plan: Few | Grouped) -> None:
    """The op at its real size by `plan` against its meaning, on the same device. Raises AssertionError."""
    tolerance = gated_op.tolerances[DTYPE]
    wanted = layer._replace(residual=layer.residual.clone())
    got = layer._replace(residual=layer.residual.clone())
    gated_op.meaning(*wanted)
    moe_gated.run_plan(plan, *got)
    torch.testing.assert_close(
        got.residual,
        wanted.residual,
        rtol=tolerance.relative,
        atol=tolerance.absolute,
        msg=lambda text: f"{shape}, {len(layer.x)} tokens, {plan}: {text}",
    )


def warm(shape: Experts, plans: list[Few | Grouped]) -> None:
    """Compiles the plans' kernels into Triton's cache, for which one expert will do."""
    x = torch.zeros(2, shape.hidden, dtype=DTYPE, device="cuda")
    layer = Layer(
        x,
        torch.zeros(2, shape.top_k, device="cuda"),
        torch.zeros(2, shape.top_k, dtype=torch.int32, device="cuda"),
        torch.zeros(1, 2 * shape.inner, shape.hidden, dtype=DTYPE, device="cuda"),
        torch.zeros(1, shape.hidden, shape.inner, dtype=DTYPE, device="cuda"),
        torch.zeros_like(x),
    )
    for plan in plans:
        moe_gated.run_plan(plan, *layer)
    router = torch.zeros(shape.num_experts, shape.hidden, dtype=DTYPE, device="cuda")
    for tokens in (1, 64, 4096):
        rows = torch.zeros(tokens, shape.hidden, dtype=DTYPE, device="cuda")
        norm_route.run(rows, rows[0], 1e-6, router, None, shape.top_k, True)
    torch.cuda.synchronize()


def mlp(plan: Few | Grouped, top_k: int, norm: Tensor, router: Tensor, layer: Layer) -> None:
    normed, weights, chosen = norm_route.run(layer.residual, norm, 1e-6, router, None, top_k, True)
    moe_gated.run_plan(plan, normed, weights, chosen, layer.gate_up, layer.down, layer.residual)


def candidates(shape: Experts, sizes: Iterable[int]) -> Iterator[Few | Grouped]:
    """Plans that together use every kernel that the search may try."""
    if any(tokens * shape.top_k <= FEW_PAIRS for tokens in sizes):
        for number, down in enumerate(few_downs(shape)):
            yield Few(*UP_FEW[number % len(UP_FEW)], *down)
    for block_m in sorted({size for tokens in sizes for size in block_sizes(shape, tokens)}):
        ups, downs = UP_TILES[block_m], DOWN_TILES[block_m]
        for number in range(max(len(ups), len(downs))):
            yield Grouped(block_m, Tile(*ups[number % len(ups)]), Tile(*downs[number % len(downs)]))


def best(tries: Iterable[tuple[Any, Callable[..., Any], list[tuple[Any, ...]]]]) -> tuple[Any, float]:
    """The fastest of (what, run, argument sets), in microseconds; those that do not fit the device are left out."""
    found = []
    for what, run, sets in tries:
        try:
            found.append((per_call_us(run, sets), what))
        except (RuntimeError, TritonError) as error:
            print(f"{what} cannot: {str(error).splitlines()[0][:100]}")
    us, what = min(found, key=lambda entry: entry[0])
    return what, us


def tune(shape: Experts, layers: list[Layer]) -> tuple[Few | Grouped, float, float]:
    """The fastest plan, and its products' times; each product is chosen alone, then whole plans are compared."""
    num_tokens = len(layers[0].x)
    finalists: list[tuple[Few | Grouped, float, float]] = []
    if num_tokens * shape.top_k <= FEW_PAIRS:
        default = _moe_plan.default_few(shape)
        ups = ((up, partial(moe_gated.few_up, Few(*up, *default[3:]))) for up in UP_FEW)
        up, up_us = best((what, run, [(v.x, v.experts, v.gate_up) for v in layers]) for what, run in ups)
        gated = [moe_gated.few_up(default, v.x, v.experts, v.gate_up) for v in layers]
        downs = ((down, partial(moe_gated.few_down, Few(*default[:3], *down))) for down in few_downs(shape))
        sets = [(h, v.weights, v.experts, v.down, v.residual) for h, v in zip(gated, layers, strict=True)]
        down, down_us = best((what, run, sets) for what, run in downs)
        finalists.append((Few(*up, *down), up_us, down_us))
    for block_m in block_sizes(shape, num_tokens):
        ordered = [Sorted(v.experts, shape.num_experts, block_m) for v in layers]
        up_sets = [(o, v.x, shape.top_k, v.gate_up) for o, v in zip(ordered, layers, strict=True)]
        up_tile, up_us = best(
            (tile, partial(moe_gated.grouped_up, Tile(*tile), block_m), up_sets) for tile in UP_TILES[block_m]
        )
        gated = [moe_gated.grouped_up(Tile(*up_tile), block_m, *arguments) for arguments in up_sets]
        down_sets = [(o, h, v.down) for o, h, v in zip(ordered, gated, layers, strict=True)]
        down_tile, down_us = best(
            (tile, partial(moe_gated.grouped_down, Tile(*tile), block_m), down_sets) for tile in DOWN_TILES[block_m]
        )
        finalists.append((Grouped(block_m, Tile(*up_tile), Tile(*down_tile)), up_us, down_us))
    chosen, _ = best((entry, partial(moe_gated.run_plan, entry[0]), list(layers)) for entry in finalists)
    plan, up_us, down_us = chosen
    return plan, up_us, down_us


def floor(shape: Experts, layers: list[Layer], bytes_per_s: float, flops_per_s: float) -> tuple[float, str]:
    """Microseconds, and what it is the floor of: weights of the experts that are used read once, products."""
    used = sum(int((layer.experts.flatten().bincount() > 0).sum()) for layer in layers) / len(layers)
    matrix = 3 * shape.hidden * shape.inner
    num_tokens = len(layers[0].x)
    by_bytes = (used * matrix + 3 * num_tokens * shape.hidden) * DTYPE.itemsize / bytes_per_s * 1e6
    by_flops = 2 * num_tokens * shape.top_k * matrix / flops_per_s * 1e6
    return (by_bytes, "bytes") if by_bytes >= by_flops else (by_flops, "flops")


def row_of(figure: Figure) -> dict[str, Any]:
    plan = figure.plan
    row: dict[str, Any] = MODELS[figure.model]._asdict() | {"tokens": figure.tokens}
    row |= {"few": plan} if isinstance(plan, Few) else {"block_m": plan.block_m, "up": plan.up, "down": plan.down}
    return row | {"us": round(figure.us, 2), "floor_us": round(figure.floor_us, 2)}


def keep(device: torch.device, made: str, rows: list[dict[str, Any]], folder: Path) -> Path:
    """Writes the table; rows of models and numbers of tokens that were not measured stay as they are."""

    def key(row: tuned.Row) -> tuple[int, ...]:
        return (*(row[name] for name in Experts._fields), row["tokens"])

    arch = arch_of(device)
    merged = {key(row): dict(row) for row in (*tuned.read("moe_gated", arch, folder), *rows)}
    return tuned.write("moe_gated", arch, made, [merged[place] for place in sorted(merged)], folder)


def show(console: Console, figures: list[Figure]) -> None:
    table = Table(title="moe_gated, microseconds per call")
    for name in ("model", "tokens", "time", "floor", "% of floor", "", "first", "second", "route", "mlp", "plan"):
        table.add_column(name, justify="left" if name in ("model", "plan") else "right", no_wrap=True)
    for f in figures:
        plan = (
            f"few {tuple(f.plan)}" if isinstance(f.plan, Few) else f"{f.plan.block_m} {(*f.plan.up,)} {(*f.plan.down,)}"
        )
        times = (f"{f.us:,.1f}", f"{f.floor_us:,.1f}", f"{100 * f.floor_us / f.us:.0f}", f.bound)
        parts = (f"{f.up_us:,.1f}", f"{f.down_us:,.1f}", f"{f.route_us:,.1f}", f"{f.mlp_us:,.1f}")
        table.add_row(f.model, str(f.tokens), *times, *parts, plan)
    console.print(table)


def measure(name: str, sizes: Iterable[int], tuning: bool, limit: Ceilings) -> Iterator[Figure]:
    """One for each number of tokens, of the plan that is chosen now or, tuning, of the fastest; it is right."""
    shape, device = MODELS[name], torch.device("cuda", torch.cuda.current_device())
    weights = make_weights(shape, layers_of(shape))
    for size in sizes:
        layers = make_layers(shape, size, weights)
        plan, up_us, down_us = _moe_plan.choose(shape, size, device, DTYPE), 0.0, 0.0
        if tuning:
            plan, up_us, down_us = tune(shape, layers)
        gate(shape, layers[0], plan)
        us = per_call_us(partial(moe_gated.run_plan, plan), list(layers))
        norm = torch.ones(shape.hidden, dtype=DTYPE, device="cuda")
        routers = [torch.randn(shape.num_experts, shape.hidden, device="cuda").to(DTYPE) for _ in layers]
        routed = [(v.x, norm, 1e-6, router, None, shape.top_k, True) for v, router in zip(layers, routers, strict=True)]
        route_us = per_call_us(norm_route.run, routed)
        whole = [(norm, router, v) for v, router in zip(layers, routers, strict=True)]
        mlp_us = per_call_us(partial(mlp, plan, shape.top_k), whole)
        yield Figure(name, size, plan, us, up_us, down_us, route_us, mlp_us, *floor(shape, layers, *limit))


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.moe", description=__doc__)
    parser.add_argument("--model", default="", metavar="WORD", help="models whose name has it, of several words one")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--no-tune", action="store_true", help="time what moe_gated would choose now")
    parser.add_argument("--out", type=Path, default=tuned.FOLDER, help="folder for the table")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    console, begun = Console(width=190, highlight=False), time.monotonic()
    words = options.model.lower().split(",")
    names = list(dict.fromkeys(name for word in words for name in MODELS if word in name))
    if not names:
        parser.error(f"no model has {options.model!r} in its name; there are {', '.join(MODELS)}")
    sizes = [int(size) for size in options.tokens.split(",")]
    device = torch.device("cuda", torch.cuda.current_device())
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        todo = []
        for name in names:
            shape = MODELS[name]
            plans = [_moe_plan.choose(shape, size, device, DTYPE) for size in sizes]
            if not options.no_tune:
                plans = [*candidates(shape, sizes), *plans]
            todo += [pool.submit(warm, shape, [plan]) for plan in dict.fromkeys(plans)]
        for impl in (moe_route.IMPL, norm_route.IMPL, moe_gated.IMPL):
            console.print(f"{impl.op.name}: {check(impl, device, DTYPE)} cases are right")
        for future in todo:
            if (error := future.exception()) is not None:
                console.print(f"cannot: {str(error).splitlines()[0][:150]}", style="yellow", markup=False)
    console.print(f"compiled after {time.monotonic() - begun:.0f} s")
    limit = ceilings()
    figures: list[Figure] = []
    conditions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {limit.bytes_per_s / 1e12:.2f} TB/s"
    conditions += f", {limit.flops_per_s / 1e12:.0f} TFLOP/s"
    for name in names:
        figures += measure(name, sizes, not options.no_tune, limit)
        torch.cuda.empty_cache()
        if not options.no_tune:  # after each model, should the time be up
            made = f"{conditions}, python -m benchmarks.moe, {time.strftime('%Y-%m-%d')}"
            kept = keep(device, made, [row_of(figure) for figure in figures], options.out)
    show(console, figures)
    console.print(f"{conditions}; {time.monotonic() - begun:.0f} s in all")
    if not options.no_tune:
        console.print(str(kept))
    if options.json:
        rows = [row_of(figure) | figure._asdict() for figure in figures]
        Path(options.json).write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
