"""The kernels of a step of some rows, tuned where they run: in the chain of a layer.

Alone a kernel is fastest when it takes all of a processor that it can get. In a chain of dependent launches what it
takes is missing to the next one, whose weights could be on their way. So each kernel's choice is changed in turn in the
whole chain, from what the tables of the other sections say, and kept where the layer gets faster; then once more, as
the first may want something else beside a slower neighbour. A choice is dropped that computes something else than the
table's; of attention, one that is slower in long contexts.

    python -m benchmarks.tune --op layer [--rows 16,64] [--budget SECONDS]
"""

import gc
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.errors import TritonError

from benchmarks import tune_narrow
from benchmarks.layer_chain import Chain
from benchmarks.layer_stages import ASKED, Line, Stage
from benchmarks.shapes import LLAMA_8B, QWEN3_30B_A3B, QWEN3_600M, ModelShape
from benchmarks.tune_attention import LONG, LONGEST, SHORT, Heads, Tensors
from benchmarks.tuning import Bench, Row, Section, Tuned, merged
from services.worker.kernels import tuned
from services.worker.kernels.impl.triton._decode_attention import Shape

OP = "layer"
POOL = 1 << 30  # numbers of keys and values that long contexts lie in
LOSS = 1.05  # of a long context's time: what is more is not worth a short one's
GAIN = 0.997  # of the time before: what is less is noise
FAR = 1.03  # times the time before: what was slower is not tried again
OUTSIDE = 1e-4  # share of the numbers that may be further off than roundings explain that grow over some layers
ROUNDS = 2
TOGETHER = 4  # of a stage's choices that are compiled before the next chain's
LEAST_S = 30.0  # with less time left no further chains are begun


Task = tuple[Any, "Link", int, Any]  # a kernel's key; a chain, its stage, a plan


class Link(NamedTuple):
    """What a chain is of."""

    model: ModelShape
    form: str
    rows: int

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.form or 'bf16'}, {self.rows} row{'s' if self.rows > 1 else ''}"


def links(rows: Iterable[int]) -> list[list[Link]]:
    """First all that need no other weights than bf16, then the others if time is left."""
    rows = list(rows)
    plain = [Link(model, "", count) for count in rows for model in (QWEN3_600M, LLAMA_8B, QWEN3_30B_A3B)]
    forms = {count: (*tune_narrow.FORMS, *(("rows8",) if count == 1 else ())) for count in rows}
    # of int8 more rows than one have fp8's lines
    return [plain, [Link(LLAMA_8B, form, count) for count in rows for form in forms[count]]]


_kept: dict[Link, Chain] = {}


def _short(link: Link) -> Chain:
    if link not in _kept:
        _kept.clear()
        gc.collect()  # its stages hold a chain in a circle, and it holds a layer's weights
        _kept[link] = Chain(*link, torch.device("cuda", torch.cuda.current_device()), 1)
    return _kept[link]


def compiled(task: Task) -> tuple[Any, str]:
    """In a process of its own: launches once; returns why it cannot be, or nothing."""
    key, link, stage, plan = task
    try:
        _short(link).stages[stage].launch(plan, 0)
        torch.cuda.synchronize()
    except (TritonError, RuntimeError, AssertionError) as error:
        return key, f"{type(error).__name__}: {error}"
    return key, ""


def tasks_of(chains: dict[Link, Sequence[Stage]]) -> list[Task]:
    """Each kernel once, the likeliest choices of all chains first, some of a chain together."""
    found: dict[Any, tuple[int, Task]] = {}
    for link, stages in chains.items():
        for number, stage in enumerate(stages):
            for place, plan in enumerate(stage.plans):
                key = stage.kernel(plan)
                found.setdefault(key, (place // TOGETHER, (key, link, number, plan)))
    return [task for _, task in sorted(found.values(), key=lambda entry: entry[0])]


def compile_all(bench: Bench, tasks: Sequence[Task]) -> set[Any]:
    """The kernels that run. Takes at most half of the time that is left."""
    kept_s, good = 0.5 * bench.left_s(), set()
    with multiprocessing.get_context("spawn").Pool(min(bench.workers, len(tasks))) as pool:
        results = pool.imap_unordered(compiled, tasks)
        for _ in tasks:
            try:
                key, reason = results.next(max(0.01, bench.left_s() - kept_s))
            except multiprocessing.TimeoutError:
                break
            if reason:
                print(f"{key}: {reason.splitlines()[0][:160]}")
            else:
                good.add(key)
    print(f"{len(good)} of {len(tasks)} kernels ran, {bench.left_s():.0f} s left", flush=True)
    return good


def near(got: Tensor, wanted: Tensor) -> bool:
    wide = wanted.float()
    inside = (got.float() - wide).abs() <= 0.25 * wide.std() + 0.1 * wide.abs()
    return float((~inside).float().mean()) <= OUTSIDE


class Search:
    """Changes one stage's plan after the other where the layer gets faster.

    `ran`: whether a stage's plan was compiled; `fits`: whether one that is faster here may be kept.
    """

    def __init__(
        self,
        chain: Chain,
        ran: Callable[[Stage, Any], bool],
        fits: Callable[[Any], bool],
        left_s: Callable[[], float],
    ) -> None:
        self.chain, self.ran, self.fits, self.left_s = chain, ran, fits, left_s
        self.plans = tuple(stage.plans[0] for stage in chain.stages)
        self.wanted = chain.result(self.plans)
        self.seen: dict[tuple[int, Any], float] = {}  # times of the time before

    def run(self) -> None:
        for _ in range(ROUNDS):
            before = self.plans
            for number, stage in enumerate(self.chain.stages):
                self.turn(number, stage.plans)
                self.turn(number, stage.around(self.plans[number]))
            if self.plans == before:
                break

    def turn(self, number: int, choices: Sequence[Any]) -> None:
        stage, times = self.chain.stages[number], dict[Any, float]()
        wanted = [
            plan
            for plan in choices
            if plan != self.plans[number] and self.ran(stage, plan) and self.seen.get((number, plan), 1.0) < FAR
        ]
        if not wanted or self.left_s() < 0:
            return
        start = self.chain.time(self.plans)  # anew: the clock of a GPU drifts
        for plan in wanted:
            if self.left_s() < 0:
                break
            tried = self.changed(number, plan)
            if all(map(near, self.chain.result(tried), self.wanted)):
                times[plan] = self.chain.time(tried)
                self.seen[number, plan] = times[plan] / start
            else:
                print(f"{stage.name} {plan}: something else")
                self.seen[number, plan] = FAR
        for plan in sorted(times, key=times.__getitem__):
            if times[plan] >= GAIN * start:
                break
            tried = self.changed(number, plan)
            if not self.fits(plan):
                continue
            now, then = self.chain.time(self.plans), self.chain.time(tried)
            if then < GAIN * now:  # of many the fastest is the luckiest, too
                print(f"  {stage.name}: {now * 1e6:.2f} to {then * 1e6:.2f} us by {said(plan)}", flush=True)
                self.plans = tried
                break

    def changed(self, number: int, plan: Any) -> tuple[Any, ...]:
        return (*self.plans[:number], plan, *self.plans[number + 1 :])

    def lines(self) -> list[Line]:
        """Of the tables: what has changed. A mixture's two products are one line."""
        pairs = list(zip(self.chain.stages, self.plans, strict=True))
        mixture = any(plan != stage.plans[0] for stage, plan in pairs if stage.name.startswith("experts"))
        found: list[Line] = []
        for stage, plan in pairs:
            if plan != stage.plans[0] or (mixture and stage.name.startswith("experts")):
                found += stage.lines(plan) if stage.lines else ()
        return found


def said(plan: Any) -> str:
    """A plan in a few characters."""
    if isinstance(plan, tuple):
        return "(" + " ".join(said(each) for each in plan) + ")"
    return str(plan)


def report(console: Console, link: Link, search: Search, bandwidth: float) -> None:
    """What came of it, and for how much of the layer each stage stands: how much faster it is without it."""
    chain, first = search.chain, tuple(stage.plans[0] for stage in search.chain.stages)
    before, after = chain.time(first), chain.time(search.plans)
    floor = chain.read_bytes / bandwidth
    title = f"{link.name}, {chain.layers} layers: {before * 1e6:.2f} to {after * 1e6:.2f} us a layer, "
    title += f"{floor / before:.1%} to {floor / after:.1%} of the bytes' floor"
    table = Table(title=title)
    for name in ("launches", "us less without them", "then", "plan"):
        table.add_column(name, justify="left" if name in ("launches", "plan") else "right")
    for number, (stage, plan) in enumerate(zip(chain.stages, search.plans, strict=True)):
        shares = ["", ""]
        if not stage.relied_on:
            less = before - chain.time(first, number), after - chain.time(search.plans, number)
            shares = [f"{seconds * 1e6:.2f}" for seconds in less]
        what = said(plan) if plan == stage.plans[0] else f"{said(stage.plans[0])} to {said(plan)}"
        table.add_row(stage.name, *shares, what if plan is not None else "")
    console.print(table)


def joined(lines: Sequence[Line]) -> dict[str, list[Row]]:
    """By table; a mixture's two products become one line."""
    found: dict[str, dict[tuple[Any, ...], Row]] = {}
    for op, line in lines:
        rows = found.setdefault(op, {})
        key = tuple(line[name] for name in ASKED[op])
        few = [*rows.get(key, {}).get("few", ()), *line.get("few", ())]
        rows[key] = rows.get(key, {}) | line if op == "moe_gated" else line
        if few:
            rows[key]["few"] = few
    return {op: [*rows.values()] for op, rows in found.items()}


class Long:
    """Whether a shape of attention keeps the speed of the table's in long contexts, as many as the pool holds."""

    def __init__(self, link: Link, first: Shape, device: torch.device) -> None:
        model = link.model
        self.heads, self.first, self.device = Heads(model.heads, model.kv_heads, model.head_dim), first, device
        self.contexts = [[LONG] * link.rows, [SHORT] * (link.rows - 1) + [LONGEST]]

    @cached_property
    def cases(self) -> list[tuple[Tensors, float]]:
        """With the time that each may take."""
        pool = torch.empty(POOL, dtype=torch.bfloat16, device=self.device).normal_()
        cases = [Tensors(self.heads, lengths, pool) for lengths in self.contexts]
        return [(case, LOSS * case.time(self.first)) for case in cases]

    def keeps(self, plan: Any) -> bool:
        return not isinstance(plan, Shape) or all(case.time(plan) <= limit for case, limit in self.cases)


def tuned_chain(bench: Bench, link: Link, good: set[Any], console: Console) -> list[Line]:
    chain = Chain(*link, bench.device)
    shape = next(stage.plans[0] for stage in chain.stages if isinstance(stage.plans[0], Shape))
    search = Search(
        chain, lambda stage, plan: stage.kernel(plan) in good, Long(link, shape, bench.device).keeps, bench.left_s
    )
    search.run()
    report(console, link, search, bench.bandwidth)
    return search.lines()


def run(bench: Bench) -> list[Tuned]:
    lines: list[Line] = []
    console = Console(width=200, highlight=False)
    for group in links(bench.rows):
        if bench.left_s() < LEAST_S:
            print(f"no time left for {', '.join(link.name for link in group)}")
            continue
        good = compile_all(bench, tasks_of({link: Chain(*link, bench.device, 1).stages for link in group}))
        for link in group:
            if bench.left_s() < 0:
                print(f"{link.name}: no time left")
                continue
            lines += tuned_chain(bench, link, good, console)
    return [Tuned(op, merged(tuned.table(op, bench.device), found, ASKED[op])) for op, found in joined(lines).items()]


SECTION = Section("layer", (OP,), run, last=True)
