"""Runs compiled kernels on the threads of torch's own OpenMP pool, so that two pools never spin against each other.

A kernel is a `numba.cfunc` of the type KERNEL: it gets the caller's numbers (mostly addresses), its thread and how many
threads run. `launch` is the only way in; kernels stay in files of their own, since numba renews a cached function only
when its own file changes. Parts of kernels are `njit` without a signature: they are compiled only with the kernel, so
not at all when that comes from the cache. State: none but compiled code.
"""

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from services.worker.kernels.registry import Facts

FLOATS, INTS = types.CPointer(types.float32), types.CPointer(types.int32)
SLOTS = 14  # numbers that a launch carries
KERNEL = types.void(types.CPointer(types.int64), types.int64, types.int64)  # numbers, thread, threads
_HEADER = 3  # kernel, omp_get_thread_num, omp_get_num_threads
_I64 = ir.IntType(64)
_I32 = ir.IntType(32)


def compiled(make: Callable[..., Any], signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """`make` is njit or cfunc; cached on disk, or compiled at every start where no cache folder can be written."""

    def decorate(function: Callable[..., Any]) -> Any:
        options = {"nogil": True} if make is njit else {}
        try:
            return make(signature, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return make(signature, **options)(function)

    return decorate


def kernel(function: Callable[..., Any]) -> int:
    """Compiles `function(numbers, thread, threads)`; its address, for `launch`. Keep the module: it owns the code."""
    code = compiled(cfunc, KERNEL)(function)
    _KEPT.append(code)
    address: int = code.address
    return address


_KEPT: list[Any] = []


@intrinsic
def floats(typing_context: Any, address: Any) -> Any:
    """The float32 numbers at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return FLOATS(types.int64), generate


@intrinsic
def ints(typing_context: Any, address: Any) -> Any:
    """The int32 numbers at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _I32.as_pointer())

    return INTS(types.int64), generate


@intrinsic
def int64s(typing_context: Any, address: Any) -> Any:
    """The int64 numbers at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _I64.as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def as_float(typing_context: Any, bits: Any) -> Any:
    """The float32 of these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@cache
def float_bits(value: float) -> int:
    """For `as_float`: a launch carries integers only."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


@intrinsic
def _call_count(typing_context: Any, address: Any) -> Any:
    """int32 f(void)"""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.FunctionType(_I32, []).as_pointer())
        return builder.sext(builder.call(pointer, []), _I64)

    return types.int64(types.int64), generate


@intrinsic
def _call_kernel(typing_context: Any, address: Any, block: Any, thread: Any, threads: Any) -> Any:
    """`block` points at a launch's block; the kernel gets what follows its header."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, block, thread, threads = arguments
        function = ir.FunctionType(ir.VoidType(), [_I64.as_pointer(), _I64, _I64])
        numbers = builder.gep(builder.bitcast(block, _I64.as_pointer()), [ir.Constant(_I64, _HEADER)])
        builder.call(builder.inttoptr(address, function.as_pointer()), [numbers, thread, threads])
        return context.get_dummy_value()

    return types.void(types.int64, types.CPointer(types.int64), types.int64, types.int64), generate


@compiled(cfunc, types.void(types.CPointer(types.int64)))
def _member(block: Any) -> None:
    """What each thread of the team runs."""
    _call_kernel(block[0], block, _call_count(block[1]), _call_count(block[2]))


@intrinsic
def _start(typing_context: Any, parallel: Any, member: Any, threads: Any, header: Any, numbers: Any) -> Any:
    """GOMP_parallel(member, block, threads, 0) with the block on the stack; without a team for one thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        parallel, member, threads, header, numbers = arguments
        block = cgutils.alloca_once(builder, ir.ArrayType(_I64, _HEADER + SLOTS))
        values = [*cgutils.unpack_tuple(builder, header), *cgutils.unpack_tuple(builder, numbers)]
        for index, value in enumerate(values):
            builder.store(value, cgutils.gep_inbounds(builder, block, 0, index))
        byte_pointer = ir.IntType(8).as_pointer()
        member_type = ir.FunctionType(ir.VoidType(), [byte_pointer]).as_pointer()
        start_type = ir.FunctionType(ir.VoidType(), [member_type, byte_pointer, _I32, _I32]).as_pointer()
        member, block = builder.inttoptr(member, member_type), builder.bitcast(block, byte_pointer)
        alone = builder.icmp_signed("<=", threads, ir.Constant(_I64, 1))
        with builder.if_else(alone) as (then, otherwise):
            with then:
                builder.call(member, [block])
            with otherwise:
                team = [member, block, builder.trunc(threads, _I32), ir.Constant(_I32, 0)]
                builder.call(builder.inttoptr(parallel, start_type), team)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, header, numbers), generate


_HEADERS = types.UniTuple(types.int64, _HEADER)
_NUMBERS = types.UniTuple(types.int64, SLOTS)


@compiled(njit, types.void(types.int64, types.int64, types.int64, _HEADERS, _NUMBERS))
def _launch(parallel: int, member: int, threads: int, header: Any, numbers: Any) -> None:
    _start(parallel, member, threads, header, numbers)


def _openmp() -> tuple[int, ...]:
    """Addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads as torch itself calls them, or none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    try:
        loaded = ctypes.CDLL(str(library))
        return tuple(ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in names)
    except (OSError, AttributeError):
        return ()


_OPENMP = _openmp()


def unavailable() -> str | None:
    """Why kernels cannot run here, or None."""
    if not _OPENMP:
        return "torch's OpenMP library has no GNU interface"
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "this CPU has no AVX2"
    return None


def refuses_but_fp32(facts: Facts) -> str | None:
    """What every op here needs whose tensors all have the activations' dtype."""
    if facts.device != "cpu":
        return "for CPUs"
    if facts.dtype != torch.float32:
        return f"computes in fp32, not {str(facts.dtype).removeprefix('torch.')}"
    return unavailable()


def launch(address: int, threads: int, *numbers: int) -> None:
    """Runs the kernel at `address` on `threads` threads and waits. At most SLOTS numbers, each fits 64 bits."""
    padded = numbers + (0,) * (SLOTS - len(numbers))
    _launch(_OPENMP[0], _member.address, threads, (address, _OPENMP[1], _OPENMP[2]), padded)
