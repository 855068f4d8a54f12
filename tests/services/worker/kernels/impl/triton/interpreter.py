"""Corrections to Triton's interpreter, so that bf16 and fp8 mean there what they mean on a GPU.

The interpreter keeps bf16 and fp8 as integers. Its casts truncate and its arithmetic works on those integers. Here
they are widened to fp32, computed, and rounded to nearest even; fp8 saturates. Callers: conftest.py, once.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder
PACKED = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}


def widen(handle: Any) -> Any:
    """The handle's numbers in a form that numpy computes with."""
    kind = PACKED.get(handle.dtype.scalar)
    if kind is None:
        return handle.data
    return torch.from_numpy(np.ascontiguousarray(handle.data)).view(kind).float().numpy()


def narrow(values: Any, dtype: Any) -> Any:
    """A handle of `dtype` that holds `values`, rounded."""
    kind = PACKED.get(dtype.scalar)
    if kind is None:
        return Handle(values.astype(interpreter._get_np_dtype(dtype)), dtype.scalar)
    wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    if kind is not torch.bfloat16:
        wide = wide.clamp(torch.finfo(kind).min, torch.finfo(kind).max)
    stored = torch.uint16 if kind is torch.bfloat16 else torch.uint8
    return Handle(wide.to(kind).view(stored).numpy(), dtype.scalar)


def correct() -> None:
    """Installs the corrections for the life of the process."""
    cast, fp_to_fp, binary, ternary = Builder.cast_impl, Builder.create_fp_to_fp, Builder.binary_op, Builder.ternary_op
    apply = interpreter.ReduceScanOpInterface.apply

    def is_packed(*types: Any) -> bool:
        return any(kind.scalar in PACKED for kind in types)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if is_packed(src.dtype, dst_type):
            return narrow(widen(src), dst_type.scalar)
        return cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if is_packed(src.dtype, dst_type):
            return narrow(widen(src), dst_type.scalar)
        return fp_to_fp(self, src, dst_type, rounding_mode)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not is_packed(lhs.dtype):
            return binary(self, lhs, rhs, op)
        result = op(widen(lhs), widen(rhs))
        return Handle(result, tl.int1) if result.dtype == bool else narrow(result, lhs.dtype)

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where or not is_packed(other.dtype):
            return ternary(self, lhs, rhs, other, op)
        return narrow(op(widen(lhs), widen(rhs), widen(other)), other.dtype)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return narrow(widen(x) * widen(y) + widen(z), z.dtype)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        left, right = widen(a), widen(b)
        if left.dtype.itemsize < 4:  # numpy sums in the operands' own type
            wide = np.float32 if left.dtype.kind == "f" else np.int32
            left, right = left.astype(wide), right.astype(wide)
        return narrow(np.matmul(left, right).astype(d.data.dtype) + d.data, d.dtype)

    def reduced(self: Any, values: Any) -> Any:
        if any(is_packed(value.dtype) for value in (values if isinstance(values, tuple) else (values,))):
            raise TypeError("reduce and scan in float32: a sum of bf16 or fp8 loses its digits on a GPU too")
        return apply(self, values)

    Builder.cast_impl, Builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    Builder.binary_op, Builder.ternary_op = binary_op, ternary_op
    Builder.create_fma, Builder.create_dot = create_fma, create_dot
    Builder.get_bf16 = lambda self, value: narrow(np.array([value], dtype=np.float32), tl.bfloat16)
    interpreter.ReduceScanOpInterface.apply = reduced
