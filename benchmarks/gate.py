"""An implementation's answers against its op's meaning, on any device. No figure of a benchmark without it.

The meaning runs on the CPU. Callers: benchmarks/kernels.py, and the tests of kernels, which add traps.
"""

from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.gpu_arch import arch_of
from services.worker.kernels.outcome import Mover, convert, equal_bits, outcome, tensors
from services.worker.kernels.registry import Case, Facts, Impl, Op, Tolerance

__all__ = ["check", "compare", "compare_outcomes", "convert", "equal_bits", "facts", "outcome", "place_of", "tensors"]

UNTOUCHED = Tolerance(0.0, 0.0, "the meaning leaves it as it is")


def facts(device: torch.device, dtype: torch.dtype) -> Facts:
    """What a choice of an implementation may depend on; shapes are left open."""
    if device.type == "cpu":
        return Facts("cpu", dtype=dtype)
    return Facts("cuda", arch_of(device), dtype)


def compare(left: Tensor, right: Tensor, tolerance: Tolerance, place: str) -> None:
    """Raises AssertionError, with `place`, if they differ by more than the tolerance. Whole numbers must be equal."""
    assert left.dtype == right.dtype, f"{place} is {left.dtype}, not {right.dtype}"
    assert left.shape == right.shape, f"{place} is {tuple(left.shape)}, not {tuple(right.shape)}"
    is_exact = tolerance.relative == tolerance.absolute == 0.0 or not right.is_floating_point()
    if is_exact and not equal_bits(left, right):
        wrong = (left.double() != right.double()).nonzero()
        if len(wrong):
            first = tuple(wrong[0].tolist())
            text = f"{len(wrong)} of {right.numel()} differ; at {first} {left[first].item()}, not {right[first].item()}"
            raise AssertionError(f"{place}: {text}")
    if not is_exact:
        if right.element_size() == 1:
            # a small difference before the rounding to 3 bits is one unit after it
            most = float(right.float().abs().nan_to_num(0.0).max()) if right.numel() else 0.0
            absolute = tolerance.absolute + 2.0**-9 + tolerance.of_largest * most
            tolerance = Tolerance(tolerance.relative + 0.125, absolute, tolerance.why)
        torch.testing.assert_close(
            left.double(),
            right.double(),
            rtol=tolerance.relative,
            atol=tolerance.absolute,
            msg=lambda text: f"{place}: {text}",
        )


def compare_outcomes(
    got: dict[str, Tensor], wanted: dict[str, Tensor], before: dict[str, Tensor], tolerance: Tolerance, place: str
) -> None:
    """`before`: the arguments as they were. What the meaning has not changed may not change in a single bit."""
    assert list(got) == list(wanted), f"{place}: gives {list(got)}, not {list(wanted)}"
    for name, right in wanted.items():
        is_fixed = name in before and equal_bits(before[name], right)
        compare(got[name].cpu(), right, UNTOUCHED if is_fixed else tolerance, f"{place} {name}")


def place_of(op: Op[Any], case: Case, dtype: torch.dtype) -> str:
    return f"{op.name}/{case.name}/{str(dtype).removeprefix('torch.')}"


def check(impl: Impl[Any], device: torch.device, dtype: torch.dtype) -> int:
    """Holds the implementation against all cases in one dtype; returns how many. Raises AssertionError."""
    if dtype not in impl.op.tolerances or impl.refuses(facts(device, dtype)) is not None:
        return 0
    for case in impl.op.cases:
        before, arguments = outcome(None, case.make(dtype)), case.make(dtype)
        wanted = outcome(impl.op.meaning(*arguments), arguments)
        moved = convert(case.make(dtype), Mover(device))
        got = outcome(impl.run(*moved), moved)
        compare_outcomes(got, wanted, before, impl.op.tolerances[dtype], place_of(impl.op, case, dtype))
    return len(impl.op.cases)
