"""Which kernel, in which geometry, multiplies with a dense weight; and its launch.

The choice depends on shapes only: a table of measurements per GPU where there is one (kernels/tuned), else a rule. It
is made once per shape. Few rows take the kernels of `_dense_vector` and `_dense_matrix`; many, torch's own product,
"apart" from the norm, the gate and the residual around it.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from services.worker.kernels.gpu_arch import arch_of
from services.worker.kernels.impl.triton._dense_matrix import matrix_kernel, part_size
from services.worker.kernels.impl.triton._dense_vector import vector_kernel
from services.worker.kernels.impl.triton._launch import AotCase, Constant, options, processors
from services.worker.kernels.tuned import table

BUCKETS = (1, 4, 16, 32, 64)  # rows up to which a choice holds; above the last, apart
PARTS_LIMIT = 4 << 20  # numbers
BLOCKS_LIMIT = 1 << 16
NEAR = 1.5  # |log2| of the ratios of both sides, up to which another shape's measurement is taken


class Plan(NamedTuple):
    """`path`: "vector" (one row), "matrix" or "apart". The rest is the kernels' geometry."""

    path: str
    block_n: int = 0
    block_k: int = 0
    split: int = 1  # parts of K within a program
    parts: int = 1  # parts of K in programs of their own
    warps: int = 4
    stages: int = 1
    depth: int = 0


APART = Plan("apart")


class Device(NamedTuple):
    """What the rule needs to know of a GPU."""

    processors: int = 132
    lanes: int = 32
    shared: int = 200 * 1024  # bytes that a program's tiles may take
    rows: int = 8  # of the weight per program that multiplies one row


@cache
def describe(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(processors=1, rows=128)  # few, large programs: they are interpreted one after the other
    if torch.version.hip:
        return Device(processors(device), 64, (128 if arch_of(device) == "gfx950" else 56) * 1024)
    return Device(processors(device))


@cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Where programs that share outputs leave their parts, and how many have. One stream at a time may use it.

    Made by the first launch that needs it, which must not be under capture (nothing is compiled under capture either).
    """
    parts = torch.empty(PARTS_LIMIT, dtype=torch.float32, device=device)
    return parts, torch.zeros(BLOCKS_LIMIT, dtype=torch.int32, device=device)


def fits_workspace(chosen: Plan, limit: int, outputs: int, gated: bool) -> bool:
    blocks = -(-outputs // chosen.block_n)
    return blocks <= BLOCKS_LIMIT and (
        blocks * chosen.parts * part_size(chosen.block_n, max(16, limit), gated) <= PARTS_LIMIT
    )


def bucket(rows: int) -> int:
    """The smallest bucket that holds so many rows, 0 for none and for too many."""
    return next((limit for limit in BUCKETS if 0 < rows <= limit), 0)


@cache
def plan(kind: str, limit: int, out: int, inner: int, dtype: torch.dtype, device: torch.device) -> Plan:
    """The choice for an op (by name) of at most `limit` rows, a bucket. `out`: weight rows; `inner`: its columns."""
    if limit == 0:
        return APART
    chosen = measured(kind, limit, out, inner, device)
    if chosen is None or dtype.itemsize != 2:
        chosen = rule(limit, out, inner, kind == "norm_gated_linear", dtype.itemsize, describe(device))
    if chosen.path == "matrix":
        gated = kind == "norm_gated_linear"
        if chosen.parts > 1 and not fits_workspace(chosen, limit, out // 2 if gated else out, gated):
            chosen = chosen._replace(parts=1)
        if dtype == torch.float16 and kind.startswith("norm_"):
            return APART  # x * norm, not yet divided by the row's size, can exceed what fp16 holds
        if dtype == torch.float32 and device.type == "cuda":
            return APART  # no matrix units for it
    return chosen


def plan_for(kind: str, x: Tensor, weight: Tensor) -> Plan:
    """The choice for an op with these operands."""
    return plan(kind, bucket(len(x)), *weight.shape, x.dtype, x.device)


def measured(kind: str, limit: int, out: int, inner: int, device: torch.device) -> Plan | None:
    """The table's choice for this shape or the nearest one."""
    best, nearest = None, NEAR
    for row in table(kind, device):
        if row["rows"] != limit:
            continue
        distance = abs(math.log2(row["out"] / out)) + abs(math.log2(row["in"] / inner))
        if distance <= nearest:
            best, nearest = row, distance
            if distance == 0.0:
                break
    return None if best is None else Plan(**{name: best[name] for name in Plan._fields if name in best})


def rule(limit: int, out: int, inner: int, gated: bool, itemsize: int, device: Device) -> Plan:
    """Without a measurement: enough programs for all processors, tiles of some 16 kB, loads of 16 bytes a thread."""
    tiles = 2 if gated else 1
    outputs = out // tiles
    if limit == 1:
        # all of K at once, where that is no more than one load per weight row and thread
        widest, per_warp = triton.next_power_of_2(inner), device.lanes * 16 // itemsize
        block_k, warps = (widest, max(1, widest // per_warp)) if widest <= 16 * per_warp else (4 * per_warp, 2)
        block_n = device.rows // tiles
        while block_n > 1 and outputs < block_n * device.processors * 2:
            block_n //= 2
        return Plan("vector", block_n, block_k, warps=warps)
    block_m = max(16, limit)
    block_n = next((size for size in (64, 32) if outputs >= size * device.processors), 16)
    split = 1 if block_n == 64 else 4
    block_k = min(256 if split > 1 else 128, max(16 * split, triton.next_power_of_2(inner)))
    stages = 4
    while stages > 1 and (block_n * tiles + block_m) * block_k * itemsize * stages > device.shared:
        stages -= 1
    return Plan("matrix", block_n, block_k, split, 1, 4, stages, stages - 1)


def product(
    x: Tensor,
    norm: tuple[Tensor, float] | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    chosen: Plan,
    activation: str = "",
    add: bool = False,
) -> None:
    """out (+)= activation of rms_norm(x) @ weight.T + bias, by a plan that is not "apart". Contiguous tensors."""
    rows, inner = x.shape
    outputs = out.shape[1]
    norm_weight, eps = (None, 0.0) if norm is None else norm
    blocks = (outputs + chosen.block_n - 1) // chosen.block_n
    flags = {"NORM": norm is not None, "BIAS": bias is not None, "ADD": add, "ACTIVATION": activation}
    launch = {"num_warps": chosen.warps, "num_stages": chosen.stages, **options(x.device)}
    if chosen.path == "vector":
        vector_kernel[(blocks,)](
            x, norm_weight, weight, bias, out, eps, outputs, inner, **flags,
            BLOCK_N=chosen.block_n, BLOCK_K=chosen.block_k, **launch,
        )  # fmt: skip
    else:
        parts, arrived = workspace(x.device) if chosen.parts > 1 else (None, None)
        matrix_kernel[blocks, chosen.parts](
            x, norm_weight, weight, bias, out, parts, arrived, eps, rows, outputs, inner, **flags,
            BLOCK_M=max(16, bucket(rows)), BLOCK_N=chosen.block_n, BLOCK_K=chosen.block_k, SPLIT=chosen.split,
            PARTS=chosen.parts, DEPTH=chosen.depth, **launch,
        )  # fmt: skip


def aot_cases(kind: str, shapes: Sequence[tuple[int, int]], bias: bool = False, parts: int = 1) -> tuple[AotCase, ...]:
    """Each bucket's kernel for these (out, inner), as the rule chooses it where shared memory is smallest.

    `parts` are the parts of K in programs of their own, where there is more than one row.
    """
    small = Device(shared=56 * 1024)
    cases = []
    for out, inner in shapes:
        for limit in (1, 16, 64) if parts == 1 else (16,):
            chosen = rule(limit, out, inner, kind == "norm_gated_linear", 2, small)._replace(parts=parts)
            name = f"{kind}_{limit}x{inner}x{out}{'_bias' if bias else ''}{f'_parts{parts}' if parts > 1 else ''}"
            cases.append(aot_case(name, kind, limit, inner, bias, chosen))
    return tuple(cases)


def aot_case(name: str, kind: str, limit: int, inner: int, bias: bool, chosen: Plan) -> AotCase:
    norm = kind.startswith("norm_")
    signature: dict[str, Constant] = {
        "x_ptr": "*bf16:16",
        "norm_ptr": "*bf16:16" if norm else None,
        "weight_ptr": "*bf16:16",
        "bias_ptr": "*bf16:16" if bias else None,
        "out_ptr": "*bf16:16",
        "eps": "fp32",
        "N": "i32",
        "K": inner,
        "NORM": norm,
        "BIAS": bias,
        "ADD": kind == "add_linear",
        "ACTIVATION": "silu" if kind == "norm_gated_linear" else "",
        "BLOCK_N": chosen.block_n,
        "BLOCK_K": chosen.block_k,
        "PDL": False,
    }
    kernel: Any = vector_kernel
    if chosen.path == "matrix":
        kernel = matrix_kernel
        signature |= {
            "N": "i32:16",
            "parts_ptr": "*fp32:16" if chosen.parts > 1 else None,
            "arrived_ptr": "*i32:16" if chosen.parts > 1 else None,
            "M": "i32",
            "BLOCK_M": max(16, limit),
            "SPLIT": chosen.split,
            "PARTS": chosen.parts,
            "DEPTH": chosen.depth,
        }
    return AotCase(name, kernel, signature, chosen.warps, chosen.stages)
