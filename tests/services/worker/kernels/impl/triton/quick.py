"""Triton's interpreter without what it does again and again for nothing; most of the op tests' time was that.

It patches `triton.language` anew for each call of a device function, makes a table of all types to look one up,
computes every sum of integers a second time, for an assertion that it then leaves out, and calls what `tl.reduce` and
`tl.flip` combine with for every number alone. Types, and the shapes of all tensors of a type, are made once.
Caller: interpreter.py.
"""

import math
import types
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Change = tuple[object, str, object, object]  # owner, name, as it is, as a kernel that is interpreted needs it


def changes() -> list[Change]:
    """What the interpreter patches for any kernel."""
    visible = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    scope = interpreter._patch_lang(visible)
    wanted = [(owner, name, before, vars(owner)[name]) for owner, name, before in scope._changes]
    scope.restore()
    return wanted


class Patched:
    """The scope of one launch; a device function inside finds everything patched."""

    def __init__(self, wanted: list[Change]) -> None:
        self._wanted = wanted
        for owner, name, _, new in wanted:
            setattr(owner, name, new)

    def restore(self) -> None:
        for owner, name, before, _ in reversed(self._wanted):
            if before is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def reduced(self: Any, values: Any) -> list[Any]:
    """For ReduceOps.generic_reduce: neighbours are combined, all pairs at once, until one is left, as a GPU does."""
    whole, (values, axis) = self.axis is None, self.unravel(values, self.axis)
    parts, kinds = [value.handle.data for value in values], [value.dtype for value in values]
    while (size := parts[0].shape[axis]) > 1:
        assert size % 2 == 0, "Triton's shapes are powers of two"
        left, right = (
            [
                self.to_tensor(np.take(part, range(first, size, 2), axis), kind)
                for part, kind in zip(parts, kinds, strict=True)
            ]
            for first in (0, 1)
        )
        found = self.combine_fn.fn(*left, *right)
        found = found if isinstance(found, tuple | tl.tuple) else (found,)
        parts = [each.handle.data.astype(part.dtype) for each, part in zip(found, parts, strict=True)]
    if not self.keep_dims:
        parts = [part.item() if whole else np.squeeze(part, axis) for part in parts]
    return [self.to_tensor(part, kind) for part, kind in zip(parts, kinds, strict=True)]


def tensor(self: Any, handle: Any, kind: Any) -> None:
    """For tl.tensor.__init__: shape and size are the type's, which keeps them."""
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    sized = vars(kind).get("_sized")
    if sized is None:
        shape = list(kind.shape) if kind.is_block() else []
        sized = kind._sized = tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])
    self.numel, self.shape = sized


def of_elements(self: Any, scalar: Any) -> Any:
    """For block_type.with_element_ty: one of each kind of number and shape."""
    if type(scalar) is not tl.dtype:
        return tl.block_type(scalar, self.shape)
    kept = vars(self).setdefault("_kept", {self.element_ty.name: self} if type(self.element_ty) is tl.dtype else {})
    if scalar.name not in kept:
        kept[scalar.name] = made = tl.block_type(scalar, self.shape)
        made._kept = kept
    return kept[scalar.name]


def quicken() -> None:
    """For the life of the process."""
    wanted, look_up = changes(), interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = look_up(kind)
        return known[kind.name]

    def device_function(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return self.rewrite()(*arguments, **keywords)

    interpreter._patch_lang = lambda kernel: Patched(wanted)
    interpreter._get_np_dtype = np_dtype
    interpreter.InterpretedFunction.__call__ = device_function
    interpreter.ReduceOps.generic_reduce = reduced
    tl.tensor.__init__, tl.block_type.with_element_ty = tensor, of_elements
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
