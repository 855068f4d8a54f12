"""Launch geometry of products with weights of 8 and 4 bits: the matrices of the benchmarked models in each form.

As they run: few rows with norm and gate in the launch, many alone; a mixture's experts at one token. Each candidate is
compiled in a pool of processes (they share Triton's cache on disk), held against the product with the widened weight
and timed over weights that exceed the L2 cache. What is compiled for one shape serves all of the same width.
"""

import math
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from benchmarks.shapes import LLAMA_8B, QWEN3_30B_A3B
from benchmarks.tuning import Bench, Row, Section, Tuned, merged, seconds
from services.worker.kernels import tuned
from services.worker.kernels.impl.triton import _dense, _narrow_fused, _narrow_plan, _quantize
from services.worker.kernels.impl.triton._moe_sort import Sorted
from services.worker.kernels.impl.triton._narrow_plan import FEW, WIDE, Inputs, Pairs, Plan
from services.worker.kernels.impl.triton._narrow_vector import VECTOR as LANE_COLUMNS
from services.worker.kernels.ops.norm_gated_linear import norm_gated_linear
from services.worker.kernels.ops.norm_narrow_linear import narrowed, widened

OP = "narrow"
EPS = 1e-6
ROTATED = 200 << 20  # bytes of weights between two uses of the same
STANDS_FOR = {1: (1,), 16: (2, 4, 8, 16), 64: (32, 64), 128: (128,)}  # by rows measured; the last for all beyond
MEASURED = {128: 2048}
GROUPED = {16: (16,), 32: (32, 64), 128: (128,)}  # the same of an expert's rows, which stand together in blocks
TOKENS = {16: 128, 32: 512, 128: 2048}  # whose experts have about as many rows
FORMS = ("rows", "int4z", "blocks", "mxfp4")
VECTOR = (  # block_n, warps, loads per row and thread: all that keep some 64 bytes a thread on their way
    (4, 4, 1), (8, 4, 1), (8, 2, 1), (4, 8, 1), (8, 8, 1), (16, 4, 1), (4, 2, 2), (4, 4, 2), (2, 4, 4),
)  # fmt: skip
DOTS = (  # the same of integers, and what they are measured against
    (16, 4, 1), (8, 4, 1), (32, 4, 1), (4, 4, 1), (16, 4, 2), (8, 4, 2), (16, 2, 1), (8, 2, 1), (16, 1, 1), (8, 1, 1),
    (16, 2, 2), (8, 2, 2), (16, 8, 1), (8, 8, 1),
)  # fmt: skip
STREAMS = ((4, 4, 7), (4, 8, 4), (8, 8, 4))  # block_n, warps, blocks of four bits that a program goes through
FLOATS = ((8, 4, 1), (4, 4, 4), (4, 4, 2))
FEW_ROWS = (  # block_n, block_k, parts, stages, warps
    (32, 128, 1, 5, 4), (64, 64, 1, 6, 4), (64, 128, 1, 4, 4), (64, 128, 2, 4, 4), (64, 128, 4, 3, 4),
    (64, 128, 4, 5, 4), (64, 64, 4, 5, 4), (64, 128, 8, 3, 4), (64, 256, 4, 3, 4), (128, 64, 1, 4, 8),
    (128, 128, 1, 4, 8), (128, 128, 2, 3, 8), (128, 128, 4, 4, 8), (128, 128, 8, 3, 8), (128, 128, 8, 4, 4),
    (128, 256, 4, 3, 8),
)  # fmt: skip
MANY_ROWS = (  # block_m, block_n, warps, stages
    (128, 128, 8, 3), (128, 128, 8, 4), (128, 64, 4, 4), (64, 128, 4, 4), (64, 64, 4, 4), (256, 128, 8, 3),
)  # fmt: skip
GROUPS = (  # block_n, block_k, warps, stages
    (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 8, 4), (32, 128, 4, 4), (64, 64, 4, 5),
    (64, 256, 4, 3), (128, 128, 4, 3), (128, 128, 8, 3), (128, 128, 8, 4), (128, 64, 8, 4), (256, 128, 8, 3),
)  # fmt: skip


class Job(NamedTuple):
    """One product. `out`: outputs; experts, of which `top_k` are used: 0 for a dense weight; `rows`: then of each."""

    form: str
    rounded: bool
    rows: int
    out: int
    inner: int
    gated: bool = False
    normed: bool = False
    experts: int = 0
    top_k: int = 1

    @property
    def grouped(self) -> bool:
        return self.experts > 0 and self.rows > 1

    @property
    def weight_rows(self) -> int:
        return self.out * (2 if self.gated else 1)


def jobs() -> list[Job]:
    """One row of all first: what a budget does not reach keeps the rule."""
    found: dict[Job, None] = {}
    for rows in STANDS_FOR:
        for form in (*FORMS, "rows8") if rows == 1 else FORMS:
            for shape in (LLAMA_8B, QWEN3_30B_A3B):
                few = rows <= FEW
                normed = few and not ways(form, rows)[0]
                wide = [(shape.qkv_width, shape.hidden, False, normed), (shape.hidden, shape.q_width, False, False)]
                if not shape.experts:
                    gate = (
                        (shape.inner, shape.hidden, True, normed)
                        if few
                        else (2 * shape.inner, shape.hidden, False, False)
                    )
                    wide += [gate, (shape.hidden, shape.inner, False, False)]
                for size in wide:
                    for rounded in ways(form, rows):
                        found[Job(form, rounded, rows, *size)] = None
                if shape.experts and rows == 1:
                    first = Job(form, False, 1, shape.inner, shape.hidden, True, False, shape.experts, shape.top_k)
                    second = Job(form, False, 1, shape.hidden, shape.inner, False, False, shape.experts)
                    found |= {first: None, second: None}
    m = QWEN3_30B_A3B
    for rows in GROUPED:
        for form in FORMS:
            rounded = form not in ("int4z", "mxfp4")
            if rows == max(GROUPED) and form in ("int4z", "mxfp4"):
                continue  # near so many they are widened
            found[Job(form, rounded, rows, m.inner, m.hidden, True, False, m.experts, m.top_k)] = None
            found[Job(form, rounded, rows, m.hidden, m.inner, False, False, m.experts, m.top_k)] = None
    return list(found)


def ways(form: str, rows: int) -> tuple[bool, ...]:
    """Whether x is rounded, or may be, to 8 bits before the product."""
    if form in ("int4z", "mxfp4") or rows <= _narrow_plan.NORMED:
        return (False,)
    return (True, False) if form == "blocks" and rows > FEW else (True,)


def candidates(job: Job, device: _dense.Device) -> list[Plan]:
    """The rule's choice first."""
    form, tiles = job.form.removesuffix("z"), 2 if job.gated else 1
    exact = 128 if job.rounded and form == "rows" and job.inner > _narrow_plan.LONG else 0
    if job.grouped:
        longest = 128 if form in ("int4", "blocks") else 256
        others = [
            Plan(job.rows, n, k, warps, stages, 1, 1 if job.rows <= FEW else 8)
            for n, k, warps, stages in GROUPS
            if n * tiles <= 32 * warps and k <= longest and n <= job.out
        ]
        others += by_planes(form, others)
    elif job.rows == 1:
        lane = device.lanes * LANE_COLUMNS.value
        whole = _narrow_plan.by_dots(form, job.inner, asked(job, 1)[4], 2)
        shapes: Sequence[tuple[int, int, int]] = FLOATS[: 1 if form in _narrow_plan.HALVED else 3] if whole else VECTOR
        # small programs crowd onto the processors that are free first: a step in a model is slower than alone
        fewest = 1 if job.inner < 4096 else 2 if form in _narrow_plan.FOUR_BITS else 4
        shapes = [shape for shape in shapes if shape[1] >= fewest]
        others = [Plan(1, n // tiles, lane * warps * loads, warps) for n, warps, loads in shapes if n >= tiles]
        if whole:
            lane = device.lanes * _narrow_plan.span_of(form)
            for n, warps, loads in DOTS:
                block_k = lane * warps * loads
                if warps >= fewest and -job.inner % block_k <= job.inner // 4:  # columns past the end
                    others.append(Plan(1, n // tiles, block_k, warps, dots=True))
            if form in _narrow_plan.FOUR_BITS and job.inner >= 4096:
                longest = triton.next_power_of_2(job.inner)
                others += [Plan(1, n, longest, warps, dots=True, blocks=blocks) for n, warps, blocks in STREAMS]
        elif not job.experts:  # one row through matrix units
            others += [Plan(16, 64, 128, 4, 4, parts) for parts in (1, 2, 4)]
    elif job.rows <= FEW:
        longest = 128 if form in ("int4", "blocks") else 256  # a step has one scale of these
        others = [
            Plan(job.rows, n, k, warps, stages, parts, 1, k if exact else 0)
            for n, k, parts, stages, warps in FEW_ROWS
            if n * tiles <= 128 and k <= longest
        ]
        others += by_planes(form, others)
    elif job.rounded:
        others = [Plan(m, n, 128, warps, stages, 1, 8, exact) for m, n, warps, stages in MANY_ROWS]
    else:
        others = [WIDE, Plan(128, 128, 64, 8, 3, 1, 8), Plan(64, 128, 128, 4, 3, 1, 8)]
    rule = _narrow_plan.rule(*asked(job, job.rows), device)
    if job.grouped:
        rule = _narrow_plan.geometry(*asked(job, job.rows), device)._replace(parts=1)
    fitting = (p for p in others if p == WIDE or _narrow_plan.shares_fit(p, job.out, job.inner, job.gated))
    return list(dict.fromkeys([rule, *fitting]))


def by_planes(form: str, plans: Sequence[Plan]) -> list[Plan]:
    """The same with x by planes, where there is that."""
    if form not in _narrow_plan.FOUR_BITS:
        return []
    return [plan._replace(planes=True) for plan in plans if plan.block_k == 128 and plan.block_n >= 64]


def asked(job: Job, rows: int) -> tuple[str, int, int, int, int, int, bool]:
    group = {"rows": 0, "rows8": 0, "blocks": 128, "int4z": 128, "mxfp4": 32}[job.form]
    form = job.form.removesuffix("z")
    return form, rows, job.out, job.inner, group, 1 if job.rounded else 2, job.gated


class Operands:
    """A job's weight, with copies that fill more than the L2 cache, and what it is multiplied with."""

    def __init__(self, job: Job, device: torch.device, rotated: int = ROTATED) -> None:
        self.job = job
        dense = torch.randn(job.weight_rows, job.inner, device=device) / job.inner**0.5
        stored = narrowed(dense, job.form)
        self.wide = widened(*stored)
        self.narrow = _narrow_fused.narrow_of(*stored)
        if job.experts:
            parts = (None if part is None else part.expand(job.experts, *part.shape).contiguous() for part in stored)
            weight, scales, zeros = parts
            assert weight is not None and scales is not None
            self.narrow = self.narrow._replace(weight=weight, scales=scales, zeros=zeros)
        count = min(64, math.ceil(rotated / self.narrow.weight.nbytes))
        self.weights = [
            self.narrow,
            *(self.narrow._replace(weight=self.narrow.weight.clone()) for _ in range(count - 1)),
        ]
        rows = MEASURED.get(job.rows, job.rows)
        self.x = torch.randn(rows, job.inner, dtype=torch.bfloat16, device=device)
        self.norm = torch.rand(job.inner, dtype=torch.bfloat16, device=device) + 0.5 if job.normed else None
        group = 128 if job.form == "blocks" else 0
        self.inputs = Inputs(self.x, norm=None if self.norm is None else (self.norm, EPS))
        if job.rounded:
            self.inputs = Inputs(*_quantize.launch(self.x, self.narrow.weight.dtype, group)[:2])
        used = job.top_k if job.gated else min(8, max(1, job.experts))
        self.chosen: list[Tensor] | None = None
        self.ordered: Sorted | None = None
        if job.grouped:
            tokens = TOKENS[job.rows]
            experts = torch.rand(tokens, job.experts, device=device).topk(job.top_k).indices.to(torch.int32)
            self.ordered = Sorted(experts, job.experts, job.rows)
            self.reached, rows = int(torch.bincount(experts.flatten()).count_nonzero()), experts.numel()
            self.x = torch.randn(tokens if job.gated else rows, job.inner, dtype=torch.bfloat16, device=device)
            self.inputs = Inputs(self.x)
            if job.rounded:
                self.inputs = Inputs(*_quantize.launch(self.x, self.narrow.weight.dtype, group)[:2])
        elif job.experts:
            self.chosen = [torch.randperm(job.experts, device=device)[None, :used].to(torch.int32) for _ in range(64)]
            self.inputs = Inputs(self.x if job.gated else self.x.expand(used, -1).contiguous())
            rows = used
        self.out = torch.empty(rows, job.out, dtype=torch.bfloat16, device=device)

    def launch(self, plan: Plan, turn: int = 0) -> Callable[[], None]:
        weight, activation = self.weights[turn % len(self.weights)], "silu" if self.job.gated else ""
        if self.ordered is not None:
            top_k = self.job.top_k if self.job.gated else 1
            return lambda: _narrow_plan.launch_matrix(
                self.inputs, weight, self.out, plan, Pairs(self.ordered, top_k), activation=activation
            )
        if self.chosen is None:
            return lambda: _narrow_plan.product(self.inputs, weight, self.out, False, activation, plan)
        experts, top_k = self.chosen[turn], self.job.top_k if self.job.gated else 1
        return lambda: _narrow_plan.launch_vector(
            self.inputs, weight, self.out, plan, False, activation, experts, top_k
        )  # fmt: skip

    def holds(self, plan: Plan) -> bool:
        x = self.x.float()
        if self.inputs.scales is not None:  # what rounding costs is no fault of a candidate
            scales = self.inputs.scales
            x = self.inputs.x.float() * scales.repeat_interleave(self.job.inner // scales.shape[1], 1)
        norm = torch.ones(self.job.inner, device=x.device) if self.norm is None else self.norm.float()
        if self.norm is None and self.job.gated:
            gate, up = (x @ self.wide.T).chunk(2, -1)
            wanted = torch.nn.functional.silu(gate) * up
        elif self.job.gated:
            wanted = norm_gated_linear.meaning(x, norm, EPS, self.wide, None, "silu")
        else:
            normed = x if self.norm is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm
            wanted = normed @ self.wide.T
        if self.ordered is not None and self.job.gated:
            wanted = wanted.repeat_interleave(self.job.top_k, 0)
        self.out.fill_(torch.nan)
        self.launch(plan)()
        return torch.allclose(self.out.float(), wanted.expand_as(self.out), rtol=5e-2, atol=0.2 * float(wanted.std()))

    def time(self, plan: Plan) -> float:
        turns = range(len(self.weights) if self.chosen is None else 64)
        return seconds([self.launch(plan, turn) for turn in turns])

    @property
    def bytes(self) -> float:
        """What must be moved at least."""
        stored = (self.narrow.weight, self.narrow.scales, self.narrow.zeros)
        weight = float(sum(part.nbytes for part in stored if part is not None))
        if self.chosen is not None:
            weight *= len(self.out) / self.job.experts
        elif self.ordered is not None:
            weight *= self.reached / self.job.experts
        return weight + self.inputs.x.nbytes + self.out.nbytes


def kernel_key(job: Job, plan: Plan) -> tuple[Any, ...]:
    """What is compiled: the number of outputs is no part of it."""
    return job._replace(out=0, rows=min(job.rows, 2)), plan


def compiled(task: tuple[Job, Plan]) -> str:
    """In a process of its own: launches once, with few outputs; returns why it cannot be, or nothing."""
    job, plan = task
    try:
        few = job._replace(out=256, experts=min(job.experts, 8))
        Operands(few, torch.device("cuda", torch.cuda.current_device()), 0).launch(plan)()
        torch.cuda.synchronize()
    except (TritonError, RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compile_all(bench: Bench, plans: dict[Job, list[Plan]]) -> set[tuple[Any, ...]]:
    """The keys of the kernels that run. Takes at most 60 % of the time that is left."""
    tasks: dict[tuple[Any, ...], tuple[Job, Plan]] = {}
    for job, choices in plans.items():
        for plan in choices:
            tasks.setdefault(kernel_key(job, plan), (job, plan))
    kept_s, good = 0.4 * bench.left_s(), set()
    with multiprocessing.get_context("spawn").Pool(min(bench.workers, len(tasks))) as pool:
        results = pool.imap(compiled, tasks.values())
        for done, (key, (job, plan)) in enumerate(tasks.items()):
            try:
                reason = results.next(max(0.01, bench.left_s() - kept_s))
            except multiprocessing.TimeoutError:
                break
            if reason:
                print(f"{job} {plan}: {reason.splitlines()[0][:160]}")
            else:
                good.add(key)
            if done % 50 == 0:
                print(f"{done} of {len(tasks)} kernels, {bench.left_s():.0f} s left", flush=True)
    print(f"{len(good)} of {len(tasks)} kernels compiled, {bench.left_s():.0f} s left", flush=True)
    return good


def best(bench: Bench, job: Job, plans: Sequence[Plan]) -> tuple[Plan, Row] | None:
    operands, times = Operands(job, bench.device), dict[Plan, float]()
    for plan in plans:
        try:
            if operands.holds(plan):
                times[plan] = operands.time(plan)
            else:
                print(f"{job} {plan}: wrong")
        except (TritonError, RuntimeError) as error:
            print(f"{job} {plan}: {str(error).splitlines()[0][:120]}")
    if not times:
        return None
    chosen = min(times, key=times.__getitem__)
    floor = operands.bytes / bench.bandwidth / times[chosen]
    row: Row = {"us": round(times[chosen] * 1e6, 2), "floor": round(floor, 3)}
    if job.rounded and job.form == "rows":  # what fp32 sums cost, or would
        other = chosen._replace(exact=0 if chosen.exact else chosen.block_k)
        row["us_exact" if other.exact else "us_inexact"] = round(operands.time(other) * 1e6, 2)
    return chosen, row


def run(bench: Bench) -> list[Tuned]:
    found: list[Row] = []
    device = _dense.describe(bench.device)
    held = [tuple(row[name] for name in _narrow_plan.ASKED) for row in tuned.table(OP, bench.device)]
    wanted = [job for job in jobs() if not bench.missing or asked(job, job.rows) not in held]
    plans = {job: candidates(job, device) for job in wanted}
    good = compile_all(bench, plans)
    rounded_us: dict[Job, float] = {}
    for job, choices in plans.items():
        usable = [plan for plan in choices if kernel_key(job, plan) in good]
        if bench.left_s() < 0 or not usable:
            print(f"{job}: no time left")
            continue
        result = best(bench, job, usable)
        if result is None:
            continue
        chosen, row = result
        if job.rounded and not job.grouped:
            rounded_us[job] = row["us"]
        elif chosen == WIDE and row["us"] > rounded_us.get(job._replace(rounded=True), math.inf):
            chosen = _narrow_plan.geometry(*asked(job, job.rows), device)  # so that x is rounded
        for rows in (GROUPED if job.grouped else STANDS_FOR)[job.rows]:
            plan = chosen if chosen.block_m < 2 or job.rows > FEW else chosen._replace(block_m=max(16, rows))
            found.append(dict(zip(_narrow_plan.ASKED, asked(job, rows), strict=True)) | plan._asdict() | row)
    return [Tuned(OP, merged(tuned.table(OP, bench.device), found, _narrow_plan.ASKED))]


SECTION = Section("narrow", (OP,), run)
