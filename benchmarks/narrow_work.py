"""What ops with weights of 8 and 4 bits do in the models of benchmarks/shapes.py, as kernel_work.py says it of others.

No part of the decode step that benchmarks/kernels.py adds up, which is that of bf16. Weights are random codes: nothing
here asks what they were before.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernel_work
from benchmarks.kernel_work import EPS, Run, Work, random
from benchmarks.shapes import ModelShape
from services.worker.kernels.packing.fnuz import native_fp8

GROUP = 128
SCALE = 1 / 64
TIMES = 20  # so much larger are int8's numbers than fp8's
UNIT = {"rows": 16, "rows8": 16, "blocks": 128, "int4": GROUP, "mxfp4": 32}  # what sizes are multiples of
SCALE_BYTES = {"rows": 0.0, "rows8": 0.0, "blocks": 4 / 128**2, "int4": 3 / GROUP, "mxfp4": 1 / 32}  # per number
Stored = tuple[Tensor, Tensor, Tensor | None]


def stored(form: str, *shape: int) -> Stored:
    """A weight [.., out, in]: numbers, scales, zeros."""
    device, (*lead, out, inner) = kernel_work.DEVICE, shape
    if form in ("int4", "mxfp4"):
        codes = torch.randint(0, 256, (*lead, out, inner // 2), dtype=torch.uint8, device=device)
        if form == "mxfp4":
            return codes, torch.full((*lead, out, inner // 32), 120, dtype=torch.uint8, device=device), None
        scales = torch.full((*lead, out, inner // GROUP), SCALE, dtype=torch.float16, device=device)
        return codes, scales, torch.full_like(scales, 8, dtype=torch.uint8)
    numbers = eight_bits(form, *shape)
    sizes = (*lead, out // 128, inner // 128) if form == "blocks" else (*lead, out, 1)
    return numbers, torch.full(sizes, SCALE / (TIMES if form == "rows8" else 1), device=device), None


def eight_bits(form: str, *shape: int) -> Tensor:
    return random(*shape).mul_(TIMES).to(torch.int8) if form == "rows8" else random(*shape).to(native_fp8())


def weight_bytes(form: str, numbers: float) -> int:
    return int(numbers * ((0.5 if form in ("int4", "mxfp4") else 1.0) + SCALE_BYTES[form]))


def fits(form: str, *sizes: int) -> bool:
    return all(size % UNIT[form] == 0 for size in sizes)


def library(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: None, dtype: torch.dtype) -> Tensor:
    """torch's own product of fp8 rows."""
    return torch._scaled_mm(x, weight.T, scales, weight_scales.T, out_dtype=dtype)


def products(model: ModelShape, tokens: int) -> Iterator[Work]:
    """Each form at each of a layer's matrices, alone and with what surrounds it."""
    m, t = model, tokens
    shapes = {"qkv": (m.hidden, m.qkv_width), "o": (m.q_width, m.hidden)}
    if not m.experts:
        shapes |= {"gate_up": (m.hidden, 2 * m.inner), "down": (m.inner, m.hidden)}
    for label, (inner, out) in shapes.items():
        for form in UNIT:
            if fits(form, inner, out):
                yield from product(m, t, form, label, inner, out)


def product(model: ModelShape, tokens: int, form: str, label: str, inner: int, out: int) -> Iterator[Work]:
    t, flops = tokens, 2 * tokens * inner * out
    read = weight_bytes(form, inner * out)

    def work(op: str, make: Callable[[], tuple[Any, ...]], moved: int, best: Run | None = None) -> Work:
        return Work(op, f"{form} {label}", model, tokens, make, read + t * moved, flops, best)

    def scaled() -> tuple[Any, ...]:
        weight, scales, _ = stored(form, out, inner)
        own = torch.full((t, inner // 128 if form == "blocks" else 1), SCALE, device=kernel_work.DEVICE)
        bias = () if form == "blocks" else (None,)
        return eight_bits(form, t, inner), own, weight, scales, *bias, kernel_work.DTYPE

    def plain() -> tuple[Any, ...]:
        weight, scales, zeros = stored(form, out, inner)
        return random(t, inner), weight, scales, *((zeros,) if form == "int4" else ()), None

    if form in ("int4", "mxfp4"):
        yield work("int4_linear" if form == "int4" else "mxfp4_weight_linear", plain, 2 * inner + 2 * out)
    else:
        op = "block_scaled_linear" if form == "blocks" else "row_scaled_linear"
        yield work(op, scaled, inner + 2 * out, library if form == "rows" else None)
    if label in ("o", "down"):
        yield work(
            "add_narrow_linear",
            lambda: (random(t, out), random(t, inner), *stored(form, out, inner), None),
            2 * inner + 4 * out,
        )
    elif label == "qkv":
        yield work(
            "norm_narrow_linear",
            lambda: (random(t, inner), random(inner), EPS, *stored(form, out, inner), None),
            2 * inner + 2 * out,
        )
    else:
        yield work(
            "norm_gated_narrow_linear",
            lambda: (random(t, inner), random(inner), EPS, *stored(form, out, inner), None, "silu"),
            2 * inner + out,
        )


EXPERTS = {"rows": "moe_row_scaled", "blocks": "moe_block_scaled", "int4": "moe_int4", "mxfp4": "moe_mxfp4_weight"}


def mixtures(model: ModelShape, tokens: int) -> Iterator[Work]:
    m, t = model, tokens
    for form, op in EXPERTS.items() if m.experts else ():
        if not fits(form, m.hidden, m.inner):
            continue

        def make(form: str = form) -> tuple[Any, ...]:
            weights, chosen = torch.randn(t, m.experts, device=kernel_work.DEVICE).softmax(-1).topk(m.top_k, -1)
            matrices: list[Tensor | None] = []
            for out, inner in ((2 * m.inner, m.hidden), (m.hidden, m.inner)):
                codes, scales, zeros = stored(form, m.experts, out, inner)
                matrices += [codes, scales, *((zeros,) if form == "int4" else (None,) if form == "mxfp4" else ())]
            return random(t, m.hidden), weights, chosen.to(torch.int32), *matrices, random(t, m.hidden)

        reached = m.experts * (1 - (1 - m.top_k / m.experts) ** t)
        numbers = reached * 3 * m.inner * m.hidden
        moved, flops = weight_bytes(form, numbers) + 6 * t * m.hidden, 6 * t * m.top_k * m.inner * m.hidden
        yield Work(op, form, m, t, make, moved, flops)


def quantizers(model: ModelShape, tokens: int) -> Iterator[Work]:
    """Of the residual stream; those of groups where it divides."""
    m, t, dtype = model, tokens, native_fp8()
    size = t * m.hidden

    def norm() -> tuple[Any, ...]:
        return random(t, m.hidden), random(m.hidden), EPS, dtype

    yield Work("quantize_rows", "", m, t, lambda: (random(t, m.hidden), dtype), 3 * size)
    yield Work("quantize_tensor", "", m, t, lambda: (random(t, m.hidden), dtype), 5 * size)
    yield Work("norm_quantize_rows", "", m, t, norm, 3 * size)
    if m.hidden % 128 == 0:
        yield Work("quantize_groups", "", m, t, lambda: (random(t, m.hidden), dtype, 128, False), 3 * size)
        yield Work("norm_quantize_groups", "", m, t, lambda: (*norm(), 128, False), 3 * size)


def works(model: ModelShape, tokens: int) -> Iterator[Work]:
    """All of these."""
    for part in (products, mixtures, quantizers):
        yield from part(model, tokens)
