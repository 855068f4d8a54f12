"""Every call that the provider makes of AITER, made wrong on purpose: one argument of one function at a time.

What is called with what is noted while an op's cases run on a fake AITER, so that nobody has to write a mutation down.
A mutant is found if its run raises, or gives something else than the op's meaning.
"""

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from services.worker.kernels.impl import aiter as provider
from services.worker.kernels.impl.aiter._host import Function, constant
from services.worker.kernels.ops.moe_block_scaled import make_block_moe_case
from services.worker.kernels.ops.moe_mxfp4 import make_mxfp4_moe_case
from services.worker.kernels.registry import Impl
from tests.services.worker.kernels.impl.aiter.cases import CASES
from tests.services.worker.kernels.impl.aiter.hold import Held

OPS = [entry.name for entry in pkgutil.iter_modules(provider.__path__) if not entry.name.startswith("_")]
Arguments = dict[str, Any]
NOTHING = object()  # in the place of a tensor
FOUND = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
BYTES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
# What a tensor, or what is asked for, is mistaken for: as wide where bytes are only named otherwise.
MISTAKEN = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.bfloat16,
    torch.int32: torch.int64,
    torch.int64: torch.int32,
    torch.float8_e4m3fn: torch.float8_e4m3fnuz,
    torch.float8_e4m3fnuz: torch.float8_e4m3fn,
    torch.int8: torch.uint8,
    torch.uint8: torch.int8,
    torch.float4_e2m1fn_x2: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
# The op's own cases take seconds.
SMALL = {
    "moe_block_scaled": (make_block_moe_case(5, 3, 2, 256, 128),),
    "moe_mxfp4": (make_mxfp4_moe_case(5, 3, 2, 256, 256),),
}


class Mutant(NamedTuple):
    """`kind`: "keyword", "dtype", "layout" or "value"."""

    function: Function
    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.function.places[0].rpartition(':')[2].rpartition('.')[2]} {self.name} {self.kind}"

    def change(self, function: Function, given: Arguments) -> Arguments:
        """The arguments of a call, wrong if it is this mutant's."""
        if function is not self.function or self.name not in given:
            return given
        value = given[self.name]
        if self.kind == "keyword":
            return {key: each for key, each in given.items() if key != self.name} | {f"{self.name}_": value}
        wrong = WRONG[self.kind](value)
        return given if wrong is None else given | {self.name: None if wrong is NOTHING else wrong}


def other_dtype(value: Any) -> Any:
    """The same numbers in another dtype, or another dtype asked for."""
    if isinstance(value, torch.dtype):
        return MISTAKEN[value]
    if str(value) in ("bf16", "fp16"):
        return constant("triton.language:float32")
    if not isinstance(value, Tensor) or value.dtype not in MISTAKEN:
        return None
    other = MISTAKEN[value.dtype]
    if value.dtype in BYTES:
        return value.view(other)
    return (value.float() if other.itemsize == 1 else value).to(other)


def other_order(value: Any) -> Any:
    """The same shape with its numbers the other way round in memory."""
    if not isinstance(value, Tensor) or value.numel() < 2:
        return None
    numbers = value.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.itemsize])
    turned = numbers.flatten().flip(0).view(value.shape)
    return None if torch.equal(turned, numbers) else turned.view(value.dtype)


def other_value(value: Any) -> Any:
    """A count too small, the other choice, a name that is none; no tensor."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value // 2 if value > 0 else value + 2
    if isinstance(value, float):
        return value * 2 + 1
    if isinstance(value, tuple | list):
        return type(value)(other_value(each) for each in value)
    return f"{value}?" if isinstance(value, str) else NOTHING if isinstance(value, Tensor) else None


WRONG: dict[str, Callable[[Any], Any]] = {"dtype": other_dtype, "layout": other_order, "value": other_value}
KINDS = ("keyword", *WRONG)


@contextmanager
def changed(change: Callable[[Function, Arguments], Arguments]) -> Iterator[None]:
    """What is given to AITER goes through `change` first."""
    call = Function.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Function, "__call__", lambda self, /, **given: call(self, **change(self, given)))
        yield


def mutants_of(impl: Impl[Any], arch: str, dtype: torch.dtype = torch.bfloat16) -> dict[Mutant, list[Held]]:
    """Each with the cases that it changes something of, the smallest first."""
    found: dict[Mutant, list[Held]] = {}
    cases = SMALL.get(impl.op.name) or CASES.get(impl.op.name, impl.op.cases)
    for case in sorted(cases, key=lambda case: size_of(case.make(dtype))):
        held, noted = Held(impl, case, arch, dtype), set[Mutant]()

        def note(function: Function, given: Arguments, noted: set[Mutant] = noted) -> Arguments:
            for name, value in given.items():
                kinds = ["keyword", *(kind for kind, wrong in WRONG.items() if wrong(value) is not None)]
                noted |= {Mutant(function, name, kind) for kind in kinds}
            return given

        if not held.refused:
            with changed(note):
                held.got()
        for mutant in noted:
            found.setdefault(mutant, []).append(held)
    return found


def size_of(arguments: tuple[Any, ...]) -> int:
    return sum(each.numel() for each in arguments if isinstance(each, Tensor))


def is_found(mutant: Mutant, cases: Sequence[Held]) -> bool:
    """By any of the cases."""
    with changed(mutant.change):
        for held in cases:
            try:
                held.run()
            except FOUND:
                return True
    return False
