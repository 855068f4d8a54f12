"""Weights of 8 and 4 bits as kernels take them, which kernel in which geometry multiplies with one, and its launch.

The choice depends on shapes only: a table of measurements per GPU where there is one (kernels/tuned), else a rule. One
row takes the kernel of `_narrow_vector`, which multiplies with x as wide as it comes; more rows that of
`_narrow_matrix`; many with wide x, torch's product with the widened weight (`_narrow_widen`).
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_planes, _narrow_widen, _norm
from services.worker.kernels.impl.triton._dense import BLOCKS_LIMIT, PARTS_LIMIT, Device, describe, workspace
from services.worker.kernels.impl.triton._dense_matrix import part_size
from services.worker.kernels.impl.triton._launch import needs_gpu, options
from services.worker.kernels.impl.triton._narrow_matrix import narrow_matrix_kernel
from services.worker.kernels.impl.triton._narrow_stream import narrow_stream_kernel
from services.worker.kernels.impl.triton._narrow_vector import VECTOR, narrow_vector_kernel
from services.worker.kernels.packing.fnuz import FNUZ_ARCHS
from services.worker.kernels.packing.weight_tiles import matrix_shape
from services.worker.kernels.registry import Facts
from services.worker.kernels.tuned import table

FOUR_BITS = ("mxfp4", "int4")
HALVED = ("rows", "blocks")  # of e4m3, on NVIDIA
NORMED = 16  # rows up to which each program norms x for itself: at 64 that is as much work as the weight
FEW = 64  # rows that share nothing but the weight's bytes
WORD = 4  # numbers of 8 bits of which the vector kernel takes whole ones
LONG = 4096  # columns whose sum in some 14 bits is off by less than rounding x to fp8
DOTS_ROWS = 16  # of the weight, at least, for a program that makes integers of x, which is worth as much as two
FP4_ARCHS = ("gfx950",)
ASKED = ("form", "rows", "out", "in", "group", "x_bytes", "gated")  # what a row of the table is for


class Narrow(NamedTuple):
    """A weight, or the experts of a mixture. FORM and what goes with it: see `_narrow`."""

    form: str
    weight: Tensor  # [N, K], [E, N, K] or tiles, as stored
    scales: Tensor
    zeros: Tensor | None = None
    group: int = 0  # columns of a scale, where there are groups
    row_scale: bool = True

    @property
    def tiled(self) -> bool:
        return self.weight.dim() > 3

    @property
    def code(self) -> str:
        """Of a number."""
        if self.form in FOUR_BITS:
            return "e2m1" if self.form == "mxfp4" else "int4"
        return {torch.int8: "int8", torch.float8_e4m3fnuz: "e4m3fnuz"}.get(self.weight.dtype, "e4m3")

    def asked(self, rows: int) -> str:
        """The form as `choose` knows it: int8 per row has an own kernel for one row, else fp8's geometry."""
        return "rows8" if rows == 1 and self.form == "rows" and self.code == "int8" else self.form

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        *_, rows, stored = matrix_shape(self.weight) if self.tiled else self.weight.shape
        return rows, stored * (2 if self.form in FOUR_BITS else 1)


class Plan(NamedTuple):
    """A geometry of the vector kernel (block_m 1) or of the matrix kernel; block_m 0: WIDE."""

    block_m: int
    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 1
    parts: int = 1  # parts of K in programs of their own
    group_m: int = 1  # blocks of rows that go through all columns together
    exact: int = 0  # columns, a step's at most, after which fp32 takes over a sum of 8 bits by 8 bits; 0: none
    dots: bool = False  # one row as integers (`_narrow_dots`), e4m3 in halves (`_narrow_halves`)
    blocks: int = 1  # of outputs, that a program of one row goes through with all of K (`_narrow_stream`)
    planes: bool = False  # of x, in some rows beside four bits (`_narrow_matrix`)


WIDE = Plan(0, 0, 0)


class Inputs(NamedTuple):
    """What a product reads besides the weight. `scales`: of x, as the ops give them; None: x is wide."""

    x: Tensor
    scales: Tensor | None = None
    by_column: bool = False
    norm: tuple[Tensor, float] | None = None
    bias: Tensor | None = None
    planes: int = 0  # columns of a step by whose planes x lies already (`_narrow_planes`)


class Pairs(NamedTuple):
    """Rows of a mixture: sorted by expert (`_moe_sort`) in blocks of the plan's block_m, `top_k` of a row of x, and
    written by planes of so many columns, see `Inputs`.
    """

    ordered: Any
    top_k: int = 1
    planes: int = 0


def step_of(form: str, group: int, x_bytes: int) -> int:
    """Columns of a step of the matrix kernel: no more than a group has, where there are groups."""
    widest = 128 if x_bytes == 1 or form in FOUR_BITS else 64
    if form in ("int4", "int8"):
        while group % widest:
            widest //= 2
    return widest


@cache
def choose(
    form: str, rows: int, out: int, inner: int, group: int, x_bytes: int, gated: bool, device: torch.device
) -> Plan:
    """Of the table for exactly this, else by rule. `rows`: a power of two up to 128, which stands for all beyond.

    `out`: outputs; x_bytes: of a number of x, 0 if four bits.
    """
    asked = dict(zip(ASKED, (form, rows, out, inner, group, x_bytes, gated), strict=True))
    for row in table("narrow", device):
        if all(row[name] == value for name, value in asked.items()):
            return Plan(**{name: row[name] for name in Plan._fields if name in row})
    return rule(form, rows, out, inner, group, x_bytes, gated, describe(device))


def rule(form: str, rows: int, out: int, inner: int, group: int, x_bytes: int, gated: bool, device: Device) -> Plan:
    """Without a measurement."""
    if rows > FEW and x_bytes == 2 and form != "rows" and not gated and device.processors > 1:
        return WIDE  # on a CPU, where kernels are interpreted, it would leave nothing to try
    return geometry(form, rows, out, inner, group, x_bytes, gated, device)


def geometry(form: str, rows: int, out: int, inner: int, group: int, x_bytes: int, gated: bool, device: Device) -> Plan:
    """Of a kernel: enough programs for all processors, and tiles that fit."""
    tiles = 2 if gated else 1
    if rows == 1 and by_dots(form, inner, group, x_bytes) and not (form in HALVED and device.lanes == 64):
        per_warp = device.lanes * span_of(form)
        warps = min(4, triton.next_power_of_2(triton.cdiv(inner, per_warp)))
        while warps > 1 and inner % (warps * per_warp):
            warps //= 2
        most = device.rows if form in HALVED else max(DOTS_ROWS, device.rows)
        block_n = most // tiles
        while block_n > 1 and (out % block_n or out < block_n * device.processors):
            block_n //= 2
        return Plan(1, block_n, warps * per_warp, warps, dots=True)
    if rows == 1 and x_bytes and inner % WORD == 0:
        per_warp = device.lanes * VECTOR.value
        # of four bits twice the threads have as many bytes on their way
        warps = min(8 if form in FOUR_BITS else 4, triton.next_power_of_2(triton.cdiv(inner, per_warp)))
        block_n = device.rows // tiles
        while block_n > 1 and (out % block_n or out < block_n * device.processors * 2):
            block_n //= 2
        return Plan(1, block_n, warps * per_warp, warps)
    block_m = min(128, max(16, rows))
    block_k = max(32 if x_bytes == 1 else 16, step_of(form, group, x_bytes))
    x_width, width = max(x_bytes, 1), 0.5 if form in FOUR_BITS else 1.0
    if x_bytes == 4:  # fp32 serves comparison: small tiles fit everywhere
        return Plan(min(block_m, 32), 32, min(block_k, 64), stages=2)
    few = rows <= FEW
    # each block of outputs reads all of x: no more bytes than of the weight
    block_n = 64 if gated or (few and block_m * x_width <= 64 * width) else 128
    warps = 4 if block_n == 64 else 8
    stages = 5 if few else 4
    # on AMD a stage is in registers
    while stages > 2 and (block_n * tiles * width + block_m * x_width) * block_k * stages > device.shared:
        stages -= 1
    parts = 1
    if few:
        blocks = triton.cdiv(out, block_n)
        while parts < 8 and blocks * parts < device.processors and not inner % (2 * parts * block_k):
            parts *= 2
    exact = block_k if x_bytes == 1 and form == "rows" and inner > LONG else 0
    planes = NORMED < rows <= FEW and form in FOUR_BITS and x_bytes == 2 and device.lanes == 32 and block_k == 128
    plan = Plan(block_m, block_n, block_k, warps, stages, parts, 1 if few else 8, exact, planes=planes)
    return plan if shares_fit(plan, out, inner, gated) else plan._replace(parts=1)


def span_of(form: str) -> int:
    """Columns of a thread's 16 bytes in `_narrow_dots` and `_narrow_halves`."""
    return 32 if form in FOUR_BITS else 16


def by_dots(form: str, inner: int, group: int, x_bytes: int) -> bool:
    """Whether one row can be multiplied as integers, or in halves if x comes in 16 bits: whole spans, each with one
    scale.
    """
    known = x_bytes > 0 if form in ("int4", "mxfp4", "int8", "rows8") else form in HALVED and x_bytes == 2
    return known and inner % span_of(form) == 0 == group % span_of(form)


def shares_fit(plan: Plan, out: int, inner: int, gated: bool) -> bool:
    """Whether programs that share outputs have room for their parts, which must be whole steps: none reads past K."""
    blocks = triton.cdiv(out, plan.block_n)
    numbers = blocks * plan.parts * part_size(plan.block_n, plan.block_m, gated)
    whole = inner % (plan.block_k * plan.parts) == 0
    return plan.parts == 1 or (whole and blocks <= BLOCKS_LIMIT and numbers <= PARTS_LIMIT)


def needs_halves(facts: Facts) -> str | None:
    """The refusal of products that matrix units make of microscaled numbers with activations of 16 bits."""
    return needs_gpu(facts) or ("needs activations of 16 bits" if facts.dtype == torch.float32 else None)


def needs_scaled_dot(facts: Facts) -> str | None:
    """The refusal of products of two microscaled operands."""
    return needs_gpu(facts) or ("no product of two microscaled operands" if facts.arch in FNUZ_ARCHS else None)


def needs_fp4_unit(facts: Facts) -> str | None:
    """The refusal of products of FP4 by FP4: without a unit they round activations for nothing, and weights alone in
    FP4 have ops of their own. Formats ask who has this op before they choose.
    """
    if facts.device == "cuda" and facts.arch not in FP4_ARCHS:
        return "this GPU has no unit for FP4"
    return needs_halves(facts)


def strides(scales: Tensor | None, rows: int, by_column: bool) -> tuple[int, int]:
    """How far apart the scales of rows and of blocks of 128 columns are."""
    if scales is None or scales.numel() == 1:
        return 0, 0
    return (1, rows) if by_column else (scales.shape[1], 1)


def product(
    inputs: Inputs,
    weight: Narrow,
    out: Tensor,
    add: bool = False,
    activation: str = "",
    chosen: Plan | None = None,
) -> None:
    """out (+)= activation of rms_norm(x) @ weight.T + bias. Contiguous tensors; out: [T, N], T > 0."""
    rows, outputs = out.shape
    x, (_, inner) = inputs.x, weight.shape
    bits = 0 if inputs.scales is not None and weight.form == "mxfp4" else x.element_size()
    # the power of two of e8m0 goes into the matrix unit with x
    is_single = rows == 1 and not (inputs.scales is not None and weight.form.startswith("mxfp"))
    limit = triton.next_power_of_2(rows) if is_single else max(2, triton.next_power_of_2(rows))
    chosen = chosen or choose(
        weight.asked(limit), min(limit, 128), outputs, inner, weight.group, bits, activation != "", x.device
    )
    # fp16 may not hold what is normed but not yet divided
    apart = rows > NORMED or chosen.block_m == 0 or (x.dtype == torch.float16 and rows > 1)
    if inputs.norm is not None and apart and not by_planes(inputs, weight, chosen):
        x = _norm.launch(x, None, *inputs.norm)[0]
        inputs = inputs._replace(x=x, norm=None)
    if chosen.block_m == 0:
        assert inputs.scales is None and not activation, "for products that stand alone"
        wide = _narrow_widen.launch(*weight[:4], weight.group, weight.row_scale, weight.shape, x.dtype).T
        if inputs.bias is not None:
            torch.addmm(out + inputs.bias if add else inputs.bias, x, wide, out=out)
        elif add:
            out.addmm_(x, wide)
        else:
            torch.mm(x, wide, out=out)
    elif chosen.block_m == 1:
        launch_vector(inputs, weight, out, chosen, add, activation)
    else:
        launch_matrix(inputs, weight, out, chosen, add=add, activation=activation)


def widens(weight: Narrow, x: Tensor) -> bool:
    """Whether so many rows are multiplied with the widened weight, and must come neither rounded nor to be normed."""
    out, inner = weight.shape
    asked = (weight.form, 128, out, inner, weight.group, x.element_size(), False, x.device)
    return len(x) > FEW and choose(*asked).block_m == 0


def linear(inputs: Inputs, weight: Narrow, dtype: torch.dtype) -> Tensor:
    """x @ weight.T + bias as a new [T, N] of `dtype`."""
    inputs = inputs._replace(x=inputs.x.contiguous())
    out = torch.empty((len(inputs.x), weight.shape[0]), dtype=dtype, device=inputs.x.device)
    if out.numel():
        product(inputs, weight, out)
    return out


def launch_vector(
    inputs: Inputs,
    weight: Narrow,
    out: Tensor,
    chosen: Plan,
    add: bool = False,
    activation: str = "",
    experts: Tensor | None = None,
    top_k: int = 1,
) -> None:
    """Each row of `out` for itself; with `experts` by the one of its pair."""
    rows, outputs = out.shape
    if chosen.blocks > 1 and rows == 1 and experts is None:
        launch_stream(inputs, weight, out, chosen, add, activation)
        return
    block_n = math.gcd(chosen.block_n, outputs)  # a power of two: the kernel takes whole blocks
    values = weight.weight.view(torch.int32)
    norm, eps = inputs.norm or (None, 0.0)
    narrow_vector_kernel[rows, outputs // block_n](
        inputs.x, inputs.scales, norm, experts, values, weight.scales, weight.zeros, inputs.bias, out,
        eps, outputs, *strides(inputs.scales, rows // top_k, inputs.by_column),
        K=weight.shape[1], FORM=weight.form, CODE=weight.code, GROUP=weight.group, ROW_SCALE=weight.row_scale,
        TILED=weight.tiled, TOP_K=top_k, ADD=add, ACTIVATION=activation, DOTS=chosen.dots, BLOCK_N=block_n,
        BLOCK_K=chosen.block_k, num_warps=chosen.warps, num_stages=1, **options(inputs.x.device),
    )  # fmt: skip


def launch_stream(
    inputs: Inputs, weight: Narrow, out: Tensor, chosen: Plan, add: bool = False, activation: str = ""
) -> None:
    outputs = out.shape[1]
    block_n = math.gcd(chosen.block_n, outputs)
    blocks = math.gcd(chosen.blocks, outputs // block_n)
    norm, eps = inputs.norm or (None, 0.0)
    narrow_stream_kernel[(outputs // (block_n * blocks),)](
        inputs.x, inputs.scales, norm, weight.weight.view(torch.int32), weight.scales, weight.zeros, inputs.bias, out,
        eps, outputs, K=weight.shape[1], FORM=weight.form, CODE=weight.code, GROUP=weight.group,
        ROW_SCALE=weight.row_scale, TILED=weight.tiled, ADD=add, ACTIVATION=activation, BLOCK_N=block_n,
        BLOCK_K=chosen.block_k, BLOCKS=blocks, num_warps=chosen.warps, num_stages=1, **options(inputs.x.device),
    )  # fmt: skip


def by_words(inputs: Inputs, weight: Narrow, chosen: Plan) -> bool:
    """Whether numbers are read 16 bits at once beside wide x: a matrix unit takes every second or fourth column of a
    step then, 16 at least.
    """
    x, together = inputs.x, 4 if weight.form in FOUR_BITS else 2
    if inputs.scales is not None or weight.code not in ("e2m1", "int4", "e4m3") or weight.form == "mxfp8":
        return False
    whole = weight.shape[1] % together == 0 and chosen.block_k >= 16 * together
    bf16 = x.dtype == torch.bfloat16 and not torch.version.hip
    return whole and (bf16 or x.device.type == "cpu" or (weight.code == "int4" and not torch.version.hip))


def by_planes(inputs: Inputs, weight: Narrow, chosen: Plan) -> bool:
    """Whether x is put in order by a launch of its own, as `_narrow_planes` says."""
    if not chosen.planes or weight.form not in FOUR_BITS or not by_words(inputs, weight, chosen):
        return False
    return weight.shape[1] % (chosen.block_k * chosen.parts) == 0


def launch_matrix(
    inputs: Inputs,
    weight: Narrow,
    out: Tensor,
    chosen: Plan,
    pairs: Pairs | None = None,
    add: bool = False,
    activation: str = "",
) -> None:
    ordered, top_k, out_planes = pairs or Pairs(None)
    rows, outputs = out.shape
    words = by_words(inputs, weight, chosen)
    planes = by_planes(inputs, weight, chosen)
    assert inputs.planes in (0, chosen.block_k if planes else 0)
    if planes and not inputs.planes:
        inputs = inputs._replace(x=_narrow_planes.launch(inputs.x, inputs.norm, chosen.block_k), norm=None)
    norm, eps = inputs.norm or (None, 0.0)
    assert shares_fit(chosen, outputs, weight.shape[1], activation != ""), (chosen, weight.shape)
    parts, arrived = workspace(out.device) if chosen.parts > 1 else (None, None)
    blocks = triton.cdiv(rows, chosen.block_m) if ordered is None else ordered.max_blocks
    values = weight.weight.view(torch.int16) if words else weight.weight
    narrow_matrix_kernel[blocks * triton.cdiv(outputs, chosen.block_n), chosen.parts](
        inputs.x, inputs.scales, norm, values, weight.scales, weight.zeros, inputs.bias,
        None if ordered is None else ordered.plan, out, parts, arrived,
        eps, rows, outputs, 0 if ordered is None else ordered.ids_start,
        *strides(inputs.scales, len(inputs.x), inputs.by_column),
        K=weight.shape[1], FORM=weight.form, GROUP=weight.group, ROW_SCALE=weight.row_scale, TILED=weight.tiled,
        TOP_K=top_k, ADD=add, ACTIVATION=activation, BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k, GROUP_M=chosen.group_m, PARTS=chosen.parts, STAGES=chosen.stages,
        EXACT=chosen.exact, PLANES=planes, OUT_PLANES=out_planes, num_warps=chosen.warps, **options(out.device),
    )  # fmt: skip
