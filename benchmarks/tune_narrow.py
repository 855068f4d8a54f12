"""Launch geometry of products with weights of 8 and 4 bits: the matrices of the benchmarked models in each form.

Each candidate is held against the product with the widened weight, then timed over weights that exceed the L2 cache.
What is compiled for one shape serves all shapes of the same width, so that jobs go by width.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from benchmarks.shapes import LLAMA_8B, QWEN3_30B_A3B
from benchmarks.tuning import Bench, Row, Section, Tuned, seconds
from services.worker.kernels.impl.triton import _dense, _narrow_fused, _narrow_plan, _quantize
from services.worker.kernels.impl.triton._narrow_plan import Inputs, Narrow, Plan
from services.worker.kernels.ops.norm_narrow_linear import narrowed, widened

OP = "narrow"
ROTATED = 200 << 20  # bytes of weights between two uses of the same
ROWS = (1, 2, 16, 32, 64, 128)  # powers of two, as the choice is asked for; the last stands for all beyond
MEASURED_ROWS = {128: 2048}
FORMS = (("rows", True), ("rows", False), ("blocks", True), ("int4z", False), ("mxfp4", False))  # rounded x, or wide
VECTOR = tuple((block_n, factor) for block_n in (1, 2, 4, 8, 16) for factor in (1, 2, 4))
FEW = tuple(
    (n, k, parts, stages) for n in (32, 64, 128) for k in (64, 128, 256) for parts in (1, 2, 4, 8) for stages in (3, 5)
)
MANY = tuple(
    (m, n, k, warps, s)
    for m in (64, 128, 256)
    for n in (64, 128)
    for k in (64, 128)
    for warps in (4, 8)
    for s in (3, 4)
)


class Job(NamedTuple):
    form: str
    rounded: bool
    rows: int
    out: int
    inner: int


def jobs() -> list[Job]:
    found: dict[Job, None] = {}
    for shape in (LLAMA_8B, QWEN3_30B_A3B):
        sizes = [(shape.qkv_width, shape.hidden), (shape.hidden, shape.q_width)]
        sizes += [] if shape.experts else [(2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)]
        for out, inner in sizes:
            for form, rounded in FORMS:
                for rows in ROWS:
                    found[Job(form, rounded, rows, out, inner)] = None
    return sorted(found, key=lambda job: (job.rows, job.form, job.inner))


def candidates(job: Job, narrow: Narrow, chosen: Plan, lanes: int) -> list[Plan]:
    """The rule's choice first."""
    if chosen.block_m == 1:
        per_warp = lanes * (32 if narrow.form in _narrow_plan.FOUR_BITS else 16)
        others = [Plan(1, block_n, factor * per_warp, factor) for block_n, factor in VECTOR]
    elif job.rows <= 64:
        others = [Plan(chosen.block_m, n, k, 4, stages, parts) for n, k, parts, stages in FEW]
    else:
        others = [Plan(m, n, k, warps, stages, 1, 8) for m, n, k, warps, stages in MANY]
    if narrow.form == "int4":
        others = [plan for plan in others if plan.block_m == 1 or narrow.group % plan.block_k == 0]
    fitting = (plan for plan in others if plan != chosen and _narrow_plan.shares_fit(plan, job.out, job.inner, False))
    return [chosen, *fitting]


def copies(narrow: Narrow) -> list[Narrow]:
    count = min(64, math.ceil(ROTATED / narrow.weight.nbytes))
    return [narrow._replace(weight=narrow.weight.clone()) for _ in range(count)]


def best(bench: Bench, job: Job, narrow: Narrow, wide: Tensor) -> Row:
    rows = MEASURED_ROWS.get(job.rows, job.rows)
    x = torch.randn(rows, job.inner, dtype=torch.bfloat16, device=bench.device)
    group = 128 if narrow.form == "blocks" else 0
    inputs = Inputs(*_quantize.launch(x, narrow.weight.dtype, group)[:2]) if job.rounded else Inputs(x)
    x_bytes = inputs.x.element_size()
    device = _dense.describe(bench.device)
    asked = (narrow.form, job.rows, job.out, job.inner, narrow.group, x_bytes, False)
    out = torch.empty(rows, job.out, dtype=torch.bfloat16, device=bench.device)
    wanted = x.float() @ wide.T
    weights, times = copies(narrow), dict[Plan, float]()

    def launch(plan: Plan, weight: Narrow) -> Callable[[], None]:
        return lambda: _narrow_plan.product(inputs, weight, out, chosen=plan)

    for plan in candidates(job, narrow, _narrow_plan.rule(*asked, device), device.lanes):
        if times and bench.left_s() < 0:
            break
        try:
            out.fill_(torch.nan)
            launch(plan, narrow)()
            if not torch.allclose(out.float(), wanted, rtol=5e-2, atol=0.2 * float(wanted.std())):
                print(f"{job} {plan}: wrong")
                continue
            times[plan] = seconds([launch(plan, weight) for weight in weights])
        except (TritonError, RuntimeError) as error:
            print(f"{job} {plan}: {str(error).splitlines()[0][:120]}")
    chosen = min(times, key=times.__getitem__)
    row: Row = dict(zip(_narrow_plan.ASKED, asked, strict=True)) | chosen._asdict()
    read = narrow.weight.nbytes + narrow.scales.nbytes + (0 if narrow.zeros is None else narrow.zeros.nbytes)
    moved = read + rows * (job.inner * x_bytes + job.out * 2)
    floor = round(moved / bench.bandwidth / times[chosen], 3)
    return row | {"us": round(times[chosen] * 1e6, 2), "floor": floor}


def run(bench: Bench) -> list[Tuned]:
    found: list[Row] = []
    kept: dict[tuple[str, int, int], tuple[Narrow, Tensor]] = {}
    for job in jobs():
        if bench.left_s() < 0:
            print(f"{job}: no time left")
            continue
        key = (job.form, job.out, job.inner)
        if key not in kept:
            stored = narrowed(torch.randn(job.out, job.inner, device=bench.device) / job.inner**0.5, job.form)
            kept[key] = _narrow_fused.narrow_of(*stored), widened(*stored)
        found.append(best(bench, job, *kept[key]))
    return [Tuned(OP, found)]


SECTION = Section("narrow", (OP,), run)
