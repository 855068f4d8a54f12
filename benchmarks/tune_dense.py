"""Launch geometry of dense products: every shape of the benchmarked models at every bucket of rows.

Each candidate is compiled in a pool of processes (they share Triton's cache on disk), checked against the op's meaning
and timed; "apart" (our norm and gate around the best plain product, ours or torch's) competes like the others.
"""

import math
import multiprocessing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from benchmarks.shapes import MODELS
from benchmarks.tuning import Bench, Row, Section, Tuned, merged, seconds
from services.worker.kernels import tuned
from services.worker.kernels.impl.triton import _dense
from services.worker.kernels.impl.triton._dense import APART, BUCKETS, Plan
from services.worker.kernels.impl.triton.add_linear import add_linear_by_plan
from services.worker.kernels.impl.triton.linear import linear_by_plan
from services.worker.kernels.impl.triton.norm_gated_linear import norm_gated_linear_by_plan
from services.worker.kernels.impl.triton.norm_linear import norm_linear_by_plan
from services.worker.kernels.registry import all_ops

OPS = ("linear", "norm_linear", "add_linear", "norm_gated_linear")
EPS = 1e-6
ROTATED = 200 << 20  # bytes of weights between two uses of the same: more than three times the H200's L2
MOST_LAUNCHES = 128
SMALL = 48 << 20  # bytes of a weight whose first tiles are worth a request before the kernel ahead has ended
VECTOR = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (2, 2), (4, 2), (8, 2))  # warps, loads per weight row and thread
MATRIX = (  # block_n, block_k, split, parts, warps, stages
    (16, 256, 4, 1, 4, 5), (16, 512, 4, 1, 4, 3),
    (32, 128, 4, 1, 4, 5), (32, 256, 4, 1, 4, 4),
    (64, 64, 1, 1, 4, 6), (64, 128, 1, 1, 4, 3), (64, 128, 1, 1, 4, 5), (64, 256, 1, 1, 4, 3),
    (128, 64, 1, 1, 4, 4), (128, 64, 1, 1, 8, 5), (128, 128, 1, 1, 8, 3),
    (16, 256, 4, 2, 4, 3), (32, 256, 4, 2, 4, 3),
    (64, 128, 1, 2, 4, 4), (64, 128, 1, 4, 4, 4), (64, 64, 1, 8, 4, 4), (64, 256, 1, 4, 4, 3),
    (128, 64, 1, 4, 8, 5), (128, 128, 1, 4, 8, 3),
)  # fmt: skip
WHOLE = (  # block_n, block_k, split, warps
    (16, 256, 4, 4), (16, 512, 4, 4), (32, 256, 4, 4), (32, 512, 4, 4), (64, 128, 1, 4), (64, 256, 1, 4),
    (64, 512, 1, 8), (128, 256, 1, 8),
)  # fmt: skip
ASKED = ("rows", "out", "in")
OTHER_ROWS = (1, 16, 64)
OTHERS = {  # weight rows and columns in gpt-oss, GLM-4.5-Air, DeepSeek-V3, Qwen3-Next and MiMo-V2-Flash
    "norm_linear": (
        (5120, 2880), (14336, 4096), (2112, 7168), (24576, 1536), (9216, 2048), (12288, 2048), (64, 2048),
        (13568, 4096), (14848, 4096),
    ),
    "norm_gated_linear": ((2816, 4096), (4096, 7168), (36864, 7168), (1024, 2048), (32768, 4096)),
    "add_linear": (
        (2880, 4096), (4096, 12288), (4096, 1408), (7168, 16384), (7168, 2048), (7168, 18432), (2048, 512),
        (4096, 8192), (4096, 16384),
    ),
}  # fmt: skip
POWER = 1 / 64  # of the random weights


class Job(NamedTuple):
    """One line of a table. `out`: weight rows."""

    op: str
    rows: int
    out: int
    inner: int

    @property
    def gated(self) -> bool:
        return self.op == "norm_gated_linear"

    @property
    def outputs(self) -> int:
        return self.out // 2 if self.gated else self.out

    @property
    def bytes(self) -> int:
        """What must be read and written at least."""
        written = self.outputs * (2 if self.op == "add_linear" else 1)
        return 2 * (self.out * self.inner + self.rows * (self.inner + written))


def jobs() -> list[Job]:
    """Plain products first: "apart" needs their result."""
    found: dict[Job, None] = {}
    for shape in MODELS:
        wide = {"norm_linear": [(shape.qkv_width, shape.hidden), (shape.vocab, shape.hidden)], "add_linear": []}
        wide["add_linear"].append((shape.hidden, shape.q_width))
        if shape.experts:
            wide["linear"] = [(shape.experts, shape.hidden)]
        else:
            wide["norm_gated_linear"] = [(2 * shape.inner, shape.hidden)]
            wide["add_linear"].append((shape.hidden, shape.inner))
        for op, sizes in wide.items():
            for out, inner in sizes:
                for rows in BUCKETS:
                    found[Job(op, rows, out, inner)] = None
                    if op.startswith("norm_") and rows > 1:
                        found[Job("linear", rows, out, inner)] = None
    for op, others in OTHERS.items():
        for out, inner in others:
            for rows in OTHER_ROWS:
                found[Job(op, rows, out, inner)] = None
                if op.startswith("norm_") and rows > 1:
                    found[Job("linear", rows, out, inner)] = None
    return sorted(found, key=lambda job: OPS.index(job.op))


def held(op: str, device: torch.device) -> set[tuple[int, ...]]:
    return {tuple(row[name] for name in ASKED) for row in tuned.table(op, device)}


def candidates(job: Job, device: _dense.Device) -> list[Plan]:
    tiles = 2 if job.gated else 1
    if job.rows == 1:
        widest = 2 ** math.ceil(math.log2(job.inner))
        return [
            Plan("vector", block_n, 8 * device.lanes * warps * loads, warps=warps)
            for warps, loads in VECTOR
            for block_n in (1, 2, 4, 8, 16)
            if block_n * loads * tiles <= 16
            and (96 if block_n == 1 else 200) <= job.outputs / block_n <= 20_000
            and (block_n > 1 or job.outputs <= 1024)
            and 8 * device.lanes * warps * loads <= widest
        ]
    geometry = list(MATRIX)
    if job.inner <= 2048 and job.rows <= 16:
        whole = 2 ** math.ceil(math.log2(job.inner))
        geometry += [(16, whole, 4, 1, 4, 1), (16, whole, 8, 1, 8, 1)]
    # a part of K in one tile, on its way before the kernel ahead has ended
    for block_n, block_k, split, warps in WHOLE:
        if 2 <= (parts := math.ceil(job.inner / block_k)) <= 8:
            geometry.append((block_n, block_k, split, parts, warps, 1))
    depth = 1 if job.bytes < SMALL else 0
    plans = (
        Plan("matrix", block_n, block_k, split, parts, warps, stages, (stages - 1) * depth)
        for block_n, block_k, split, parts, warps, stages in geometry
    )
    return [plan for plan in plans if sensible(plan, job, device)]


def sensible(plan: Plan, job: Job, device: _dense.Device) -> bool:
    blocks = math.ceil(job.outputs / plan.block_n)
    shared = (plan.block_n * (2 if job.gated else 1) + max(16, job.rows)) * plan.block_k * 2 * plan.stages
    if shared > device.shared or job.inner < plan.block_k * plan.parts * min(2, plan.stages):
        return False
    if plan.block_n == 16 and job.rows > 16 and job.outputs > 2048:
        return False  # x is read too often
    if plan.parts == 1:
        return blocks >= 40 or plan.block_n == 16
    fits = _dense.fits_workspace(plan, job.rows, job.outputs, job.gated)
    return fits and blocks * plan.parts >= 40 and blocks <= device.processors * 3 // 2


def by_plan(
    op: str, x: Tensor, norm: Tensor, weight: Tensor, residual: Tensor | None, plan: Plan, plain: Plan
) -> Tensor:
    """What the op gives by a plan; `plain`: of the product itself, where that is "apart" from norm and gate."""
    if op == "add_linear":
        assert residual is not None
        add_linear_by_plan(residual, x, weight, None, plan)
        return residual
    if op == "norm_gated_linear":
        return norm_gated_linear_by_plan(x, norm, EPS, weight, None, "silu", plan, plain)
    if op == "norm_linear":
        return norm_linear_by_plan(x, norm, EPS, weight, None, plan, plain)
    return linear_by_plan(x, weight, None, plan)


class Tensors:
    """One job's arguments; weights are parts of one large random buffer."""

    def __init__(self, job: Job, weights: Tensor) -> None:
        self.job = job
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": weights.device}
        self.x = torch.randn(job.rows, job.inner, **options)
        self.norm = torch.rand(job.inner, **options) + 0.5
        self.out = torch.randn(job.rows, job.outputs, **options)
        self.start = self.out.clone()  # timing an add changes `out`
        size = job.out * job.inner
        count = min(MOST_LAUNCHES, max(1, math.ceil(ROTATED / (2 * size))), len(weights) // size)
        self.weights = [weights[i * size : (i + 1) * size].view(job.out, job.inner) for i in range(count)]

    def run(self, plan: Plan, weight: Tensor, plain: Plan = APART) -> Tensor:
        """The op by a plan; where that is "apart", the product itself by `plain`."""
        out = self.out if self.job.op == "add_linear" else None
        return by_plan(self.job.op, self.x, self.norm, weight, out, plan, plain)

    def wanted(self) -> Tensor:
        """By the op's meaning, in fp32."""
        op, weight, x = all_ops()[self.job.op], self.weights[0].float(), self.x.float()
        arguments: tuple[Any, ...] = (x, weight, None)
        if self.job.op == "add_linear":
            arguments = (self.out.float(), *arguments)
        elif self.job.op != "linear":
            arguments = (x, self.norm.float(), EPS, weight, None)
        if self.job.gated:
            arguments = (*arguments, "silu")
        result = op.meaning(*arguments)
        return arguments[0] if result is None else result  # type: ignore[no-any-return]

    def holds(self, plan: Plan, wanted: Tensor) -> bool:
        self.out.copy_(self.start)
        got = self.run(plan, self.weights[0]).float()
        return torch.allclose(got, wanted, rtol=3e-2, atol=5e-2 * float(wanted.std()))

    def time(self, plan: Plan, plain: Plan = APART) -> float:
        def launch(weight: Tensor) -> Callable[[], Tensor]:
            return lambda: self.run(plan, weight, plain)

        # at least 20 launches, so that the first one's start and the last one's end do not count
        rounds = math.ceil(20 / len(self.weights)) if self.job.bytes < SMALL else 2
        return seconds([launch(weight) for _ in range(rounds) for weight in self.weights])


def compiled(task: tuple[Job, Plan]) -> tuple[Job, Plan, str]:
    """In a process of its own: launches once; returns why it cannot be, or nothing."""
    job, plan = task
    try:
        weights = torch.zeros(job.out * job.inner, dtype=torch.bfloat16, device="cuda")
        Tensors(job, weights).run(plan, weights.view(job.out, job.inner))
        torch.cuda.synchronize()
    except (TritonError, RuntimeError) as error:
        return job, plan, f"{type(error).__name__}: {error}"
    return job, plan, ""


def kernel_key(job: Job, plan: Plan) -> tuple[Any, ...]:
    """What is compiled: the number of outputs is no part of it."""
    return job.op, max(16, job.rows) if job.rows > 1 else 1, job.inner, plan


def compile_all(bench: Bench, plans: dict[Job, list[Plan]]) -> set[tuple[Any, ...]]:
    """The keys of the kernels that run. Takes at most 60 % of the time that is left."""
    tasks: dict[tuple[Any, ...], tuple[Job, Plan]] = {}
    for job, choices in sorted(plans.items(), key=lambda item: (item[0].rows, item[0].out)):
        for plan in choices:
            tasks.setdefault(kernel_key(job, plan), (job, plan))
    kept_s = 0.4 * bench.left_s()
    good = set()
    with multiprocessing.get_context("spawn").Pool(min(bench.workers, len(tasks))) as pool:
        results = pool.imap_unordered(compiled, tasks.values())
        for _ in tasks:
            try:
                job, plan, reason = results.next(max(0.01, bench.left_s() - kept_s))
            except multiprocessing.TimeoutError:
                break
            if reason:
                print(f"{job} {plan}: {reason.splitlines()[0][:160]}")
            else:
                good.add(kernel_key(job, plan))
    print(f"{len(good)} of {len(tasks)} kernels compiled, {bench.left_s():.0f} s left")
    return good


def best(bench: Bench, job: Job, plans: list[Plan], weights: Tensor, plain: Plan) -> Row:
    tensors = Tensors(job, weights)
    wanted = tensors.wanted()
    torch_s = tensors.time(APART)
    times = {APART: torch_s if plain.path == "apart" else min(torch_s, tensors.time(APART, plain))}
    for plan in plans:
        if not tensors.holds(plan, wanted):
            print(f"{job} {plan}: wrong")
            continue
        times[plan] = tensors.time(plan)
    chosen = min(times, key=lambda plan: times[plan])
    least_s = times[chosen]
    row: Row = {"rows": job.rows, "out": job.out, "in": job.inner, "path": chosen.path}
    if chosen.path != "apart":
        row |= {name: value for name, value in chosen._asdict().items() if name != "path"}
    floor = round(job.bytes / bench.bandwidth / least_s, 3)
    return row | {"us": round(least_s * 1e6, 2), "floor": floor, "torch": round(torch_s / least_s, 2)}


def run(bench: Bench) -> list[Tuned]:
    # a norm or a gate apart needs the plain product's choice, so that it is measured too
    done = {op: held(op, bench.device) if bench.missing else set() for op in OPS}
    wanted = [job for job in jobs() if bench.wants(job.op) and job[1:] not in done[job.op]]
    if not wanted:
        return []
    device = _dense.describe(bench.device)
    plans = {job: candidates(job, device) for job in wanted}
    weights = torch.empty(max(job.out * job.inner for job in wanted), dtype=torch.bfloat16, device=bench.device)
    weights.normal_().mul_(POWER)
    good = compile_all(bench, plans)
    rows: dict[str, list[Row]] = {job.op: [] for job in wanted}
    plain: dict[tuple[int, int, int], Plan] = {}
    for job in wanted:
        if bench.left_s() < 0:
            print(f"{job}: no time left")
            continue
        usable = [plan for plan in plans[job] if kernel_key(job, plan) in good]
        row = best(bench, job, usable, weights, plain.get(job[1:], APART))
        rows[job.op].append(row)
        if job.op == "linear":
            plain[job[1:]] = Plan(**{name: row[name] for name in Plan._fields if name in row})
    return [Tuned(op, merged(tuned.table(op, bench.device), found, ASKED)) for op, found in rows.items()]


SECTION = Section("dense", OPS, run)
