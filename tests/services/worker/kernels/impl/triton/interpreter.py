"""Corrections to Triton's interpreter, so that bf16 and fp8 mean there what they mean on a GPU.

The interpreter keeps bf16 and fp8 as integers. Its casts truncate and its arithmetic works on those integers. Here
they are widened to fp32, computed, and rounded to nearest even; fp8 saturates. It is made quicker, too (quick.py).
Callers: conftest.py, once, and the processes that interpret AITER's kernels.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.services.worker.kernels.impl.triton.quick import quicken

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


def decoded(numbers: Any, scales: Any, form: Any) -> Any:
    """fp32 of an operand of a scaled product, [rows, K]: of e2m1 two to a byte, with a power of two per 32 columns."""
    if str(form).endswith("E2M1"):
        codes = np.stack((numbers.data & 15, numbers.data >> 4), axis=-1).reshape(len(numbers.data), -1)
        values = np.array((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), np.float32)[codes & 7] * np.where(codes > 7, -1, 1)
    else:
        values = widen(numbers).astype(np.float32)
    if scales is None:
        return values
    return values * np.repeat(np.ldexp(np.float32(1.0), scales.data.astype(np.int32) - 127), 32, axis=-1)


def correct() -> None:
    """Installs the corrections for the life of the process."""
    quicken()
    cast, fp_to_fp, binary, ternary = Builder.cast_impl, Builder.create_fp_to_fp, Builder.binary_op, Builder.ternary_op
    apply, scaled = interpreter.ReduceScanOpInterface.apply, TritonSemantic.dot_scaled

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

    def create_dot_scaled(self: Any, a: Any, a_scale: Any, a_form: Any, b: Any, b_scale: Any, *rest: Any) -> Any:
        """b: [K, N], its scales [N, K / 32]; `rest` begins with its form and ends with what the product is added to."""
        right = decoded(Handle(b.data.T, b.dtype), b_scale, rest[0])
        return narrow(np.matmul(decoded(a, a_scale, a_form), right.T) + rest[-1].data, rest[-1].dtype)

    def dot_scaled(self: Any, *arguments: Any) -> Any:
        return scaled(self, *(tl.constexpr(a) if isinstance(a, str) else a for a in arguments))

    def reduced(self: Any, values: Any) -> Any:
        if any(is_packed(value.dtype) for value in (values if isinstance(values, tuple) else (values,))):
            raise TypeError("reduce and scan in float32: a sum of bf16 or fp8 loses its digits on a GPU too")
        return apply(self, values)

    Builder.cast_impl, Builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    Builder.binary_op, Builder.ternary_op = binary_op, ternary_op
    Builder.create_fma, Builder.create_dot = create_fma, create_dot
    Builder.create_dot_scaled = create_dot_scaled
    TritonSemantic.dot_scaled = dot_scaled
    Builder.get_bf16 = lambda self, value: narrow(np.array([value], dtype=np.float32), tl.bfloat16)
    interpreter.ReduceScanOpInterface.apply = reduced
