"""Packed columns: how sequences of numbers travel inside messages.

A column is `bytes` of fixed-width little-endian integers. Packing 2,048 token ids this way costs 0.2 microseconds to
encode and 0.3 to decode, against 8 and 62 for a list of integers (docs/protocol.md).
Every service may use these; code that has numpy reads a column with `numpy.frombuffer` instead.
"""

import sys
from array import array
from collections.abc import Iterable

assert sys.byteorder == "little", "columns are exchanged in the machine's own order, which must be little-endian"
assert array("i").itemsize == 4 and array("Q").itemsize == 8


def pack_i32(values: Iterable[int]) -> bytes:
    """Token ids, slots, positions, counts. Raises OverflowError for a value outside int32."""
    return array("i", values).tobytes()


def pack_u64(values: Iterable[int]) -> bytes:
    """Sequence ids. Raises OverflowError for a value outside uint64."""
    return array("Q", values).tobytes()


def unpack_i32(column: bytes) -> "memoryview[int]":
    """A view of int32 values, no copy. Raises TypeError if the length is no multiple of four."""
    return memoryview(column).cast("i")


def unpack_u64(column: bytes) -> "memoryview[int]":
    """A view of uint64 values, no copy. Raises TypeError if the length is no multiple of eight."""
    return memoryview(column).cast("Q")
