"""Which kernel, in which geometry, multiplies with a dense weight; and its launch.

The choice depends on shapes only: a table of measurements per GPU where there is one (kernels/tuned), else a rule. It
is made once per shape. Few rows take the kernels of `_dense_vector` and `_dense_matrix`; many, torch's own product,
"apart" from the norm, the gate and the residual around it.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from services.worker.kernels.impl.triton._dense_matrix import matrix_kernel
from services.worker.kernels.impl.triton._dense_vector import vector_kernel
from services.worker.kernels.impl.triton._launch import AotCase, Constant, options
from services.worker.kernels.tuned import arch, table

BUCKETS = (1, 4, 16, 32, 64)  # rows up to which a choice holds; above the last, apart
NEAR = 1.5  # |log2| of the ratios of both sides, up to which another shape's measurement is taken


class Plan(NamedTuple):
    """`path`: "vector" (one row), "matrix" or "apart". The rest is the kernels' geometry."""

    path: str
    block_n: int = 0
    block_k: int = 0
    split: int = 1
    warps: int = 4
    stages: int = 1
    depth: int = 0


APART = Plan("apart")


class Device(NamedTuple):
    """What the rule needs to know of a GPU."""

    processors: int = 132
    lanes: int = 32
    shared: int = 200 * 1024  # bytes that a program's tiles may take
    rows: int = 4  # of the weight per program that multiplies one row


@cache
def describe(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(processors=1, rows=128)  # few, large programs: they are interpreted one after the other
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip:
        return Device(processors, 64, (128 if arch(device) == "gfx950" else 56) * 1024)
    return Device(processors)


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
        if dtype == torch.float16 and kind.startswith("norm_"):
            return APART  # x * norm, not yet divided by the row's size, can exceed what fp16 holds
        if dtype == torch.float32 and device.type == "cuda":
            return APART  # no matrix units for it
    return chosen


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
        block_k = min(triton.next_power_of_2(inner), 4 * device.lanes * 16 // itemsize)
        block_n = device.rows // tiles
        while block_n > 1 and outputs < block_n * device.processors * 4:
            block_n //= 2
        return Plan("vector", block_n, block_k)
    block_m = max(16, limit)
    block_n = next((size for size in (64, 32) if outputs >= size * device.processors), 16)
    split = 1 if block_n == 64 else 4
    block_k = min(256 if split > 1 else 128, max(16 * split, triton.next_power_of_2(inner)))
    stages = 4
    while stages > 1 and (block_n * tiles + block_m) * block_k * itemsize * stages > device.shared:
        stages -= 1
    return Plan("matrix", block_n, block_k, split, 4, stages, stages - 1)


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
    grid = ((outputs + chosen.block_n - 1) // chosen.block_n,)
    flags = {"NORM": norm is not None, "BIAS": bias is not None, "ADD": add, "ACTIVATION": activation}
    launch = {"num_warps": chosen.warps, "num_stages": chosen.stages, **options(x.device)}
    if chosen.path == "vector":
        vector_kernel[grid](
            x, norm_weight, weight, bias, out, eps, outputs, inner, **flags,
            BLOCK_N=chosen.block_n, BLOCK_K=chosen.block_k, **launch,
        )  # fmt: skip
    else:
        matrix_kernel[grid](
            x, norm_weight, weight, bias, out, eps, rows, outputs, inner, **flags,
            BLOCK_M=max(16, bucket(rows)), BLOCK_N=chosen.block_n, BLOCK_K=chosen.block_k, SPLIT=chosen.split,
            DEPTH=chosen.depth, **launch,
        )  # fmt: skip


def aot_cases(kind: str, shapes: Mapping[str, tuple[int, int]], bias: bool = False) -> tuple[AotCase, ...]:
    """Each bucket's kernel for these (out, inner), as the rule chooses it where shared memory is smallest."""
    cases = []
    norm, gated = kind.startswith("norm_"), kind == "norm_gated_linear"
    for model, (out, inner) in shapes.items():
        for limit in (1, 16, 64):
            chosen = rule(limit, out, inner, gated, 2, Device(shared=56 * 1024))
            signature: dict[str, Constant] = {
                "x_ptr": "*bf16:16",
                "norm_ptr": "*bf16:16" if norm else None,
                "weight_ptr": "*bf16:16",
                "bias_ptr": "*bf16:16" if bias else None,
                "out_ptr": "*bf16:16",
                "eps": "fp32",
                "M": "i32",
                "N": "i32",
                "K": inner,
                "NORM": norm,
                "BIAS": bias,
                "ADD": kind == "add_linear",
                "ACTIVATION": "silu" if gated else "",
                "BLOCK_M": max(16, limit),
                "BLOCK_N": chosen.block_n,
                "BLOCK_K": chosen.block_k,
                "SPLIT": chosen.split,
                "DEPTH": chosen.depth,
                "PDL": False,
            }
            kernel: Any = vector_kernel if chosen.path == "vector" else matrix_kernel
            if kernel is vector_kernel:
                for name in ("M", "BLOCK_M", "SPLIT", "DEPTH"):
                    del signature[name]
            name = f"{kind}_{model}_{limit}{'_bias' if bias else ''}"
            cases.append(AotCase(name, kernel, signature, chosen.warps, chosen.stages))
    return tuple(cases)
