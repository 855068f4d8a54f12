"""Reads a GGUF file's header: metadata (keys and values) and where each tensor lies. No tensor data, no numpy.

The worker (loader) and the tokenizer (vocabulary, merges, chat template) call `read_gguf`. Follows the GGUF
specification (ggml, docs/gguf.md), versions 2 and 3, little-endian. Trusts nothing in the file: every length, count,
type and offset is checked against the file's size before it is used, and a wrong one is a GgufError that names it.
"""

import mmap
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_KEY_BYTES = 65535
MAX_TENSOR_NAME_BYTES = 1024
MAX_ARRAY_DEPTH = 4

STRING_TYPE = 8
BOOL_TYPE = 7
ARRAY_TYPE = 9
# Value type code of the specification -> struct / array code.
NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# ggml type code -> (name, elements per block, bytes per block).
TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}

Value = bool | int | float | str | list["Value"]


class GgufError(ConfigError):
    """The file is not a GGUF file that can be used; the text names the file and what is wrong in it."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies: `shape` in row-major order (last axis contiguous), `offset` in bytes from file start."""

    name: str
    storage: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorRecord]


def read_gguf(path: Path) -> GgufFile:
    """The header of the GGUF file at `path`. Raises GgufError when it is damaged or not supported."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise GgufError(f"{path}: the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _Reader(path, mapped).read()
    except OSError as error:
        raise GgufError(f"{path}: {error.strerror or error}") from error


class _Reader:
    """A cursor over the mapped file; lives for one `read`."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.mapped = mapped
        self.size = len(mapped)
        self.at = 0

    def read(self) -> GgufFile:
        if self.mapped[:4] != MAGIC:
            raise self.error("not a GGUF file (wrong first bytes)")
        self.at = 4
        version = self.uint32()
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = " (big-endian files are not supported)" if swapped in VERSIONS else ""
            raise self.error(f"GGUF version {version} is not supported, only {VERSIONS}{hint}")
        num_tensors, num_keys = self.uint64(), self.uint64()
        # The smallest possible entries are 13 bytes (key) and 24 bytes (tensor): refuse before looping.
        if num_keys * 13 + num_tensors * 24 > self.size:
            raise self.error(f"{num_keys} keys and {num_tensors} tensors cannot fit in {self.size} bytes")
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self.string(MAX_KEY_BYTES, "a key")
            if key in metadata:
                raise self.error(f'key "{key}" appears twice')
            metadata[key] = self.value(key)
        return GgufFile(self.path, metadata, self.tensors(num_tensors, self.alignment(metadata)))

    def alignment(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment!r}, not a power of two")
        return alignment

    def tensors(self, num_tensors: int, alignment: int) -> dict[str, TensorRecord]:
        listed: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self.string(MAX_TENSOR_NAME_BYTES, "a tensor name")
            if name in listed:
                raise self.error(f'tensor "{name}" appears twice')
            num_dims = self.uint32()
            if not 1 <= num_dims <= MAX_DIMS:
                raise self.error(f'tensor "{name}" has {num_dims} dimensions')
            shape = tuple(reversed([self.uint64() for _ in range(num_dims)]))
            type_code, offset = self.uint32(), self.uint64()
            if type_code not in TENSOR_TYPES:
                raise self.error(f'tensor "{name}" has type {type_code}, which is not supported')
            storage, block_elements, block_bytes = TENSOR_TYPES[type_code]
            num_elements = 1
            for extent in shape:
                num_elements *= extent
            if num_elements == 0 or shape[-1] % block_elements:
                raise self.error(f'tensor "{name}" has shape {shape}, impossible for {storage}')
            if offset % alignment:
                raise self.error(f'tensor "{name}" is not aligned to {alignment} bytes')
            listed[name] = (storage, shape, offset, num_elements // block_elements * block_bytes)
        start = (self.at + alignment - 1) // alignment * alignment
        for name, (_, shape, offset, num_bytes) in listed.items():
            if start + offset + num_bytes > self.size:
                raise self.error(
                    f'tensor "{name}" {shape} ends at {start + offset + num_bytes}, behind the file\'s end'
                )
        return {
            name: TensorRecord(name, storage, shape, start + offset, num_bytes)
            for name, (storage, shape, offset, num_bytes) in listed.items()
        }

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def take(self, num_bytes: int) -> bytes:
        end = self.at + num_bytes
        if end > self.size:
            raise self.error("the file is cut short")
        taken = self.mapped[self.at : end]
        self.at = end
        return taken

    def string(self, max_bytes: int, what: str) -> str:
        num_bytes = self.uint64()
        if num_bytes > max_bytes or num_bytes > self.size - self.at:
            raise self.error(f"{what} of {num_bytes} bytes at offset {self.at}")
        try:
            return self.take(num_bytes).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} that is not UTF-8 at offset {self.at}") from error

    def value(self, key: str) -> Value:
        type_code = self.uint32()
        if type_code == STRING_TYPE:
            return self.string(self.size, f'"{key}": a string')
        if type_code == ARRAY_TYPE:
            return self.array(key, 1)
        return self.scalar(key, type_code)

    def scalar(self, key: str, type_code: int) -> bool | int | float:
        if type_code not in NUMBER_CODES:
            raise self.error(f'"{key}" has value type {type_code}, which does not exist')
        code = NUMBER_CODES[type_code]
        number: bool | int | float = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return number

    def array(self, key: str, depth: int) -> list[Value]:
        type_code, count = self.uint32(), self.uint64()
        if count > self.size - self.at:
            raise self.error(f'"{key}": {count} array entries at offset {self.at}, behind the file\'s end')
        if type_code == STRING_TYPE:
            return self.strings(key, count)
        if type_code == ARRAY_TYPE:
            if depth >= MAX_ARRAY_DEPTH:
                raise self.error(f'"{key}": arrays nested more than {MAX_ARRAY_DEPTH} deep')
            return [self.array(key, depth + 1) for _ in range(count)]
        if type_code not in NUMBER_CODES:
            raise self.error(f'"{key}" has entries of type {type_code}, which does not exist')
        if type_code == BOOL_TYPE:
            return [byte != 0 for byte in self.take(count)]
        numbers = array(NUMBER_CODES[type_code])
        numbers.frombytes(self.take(count * numbers.itemsize))
        if sys.byteorder == "big":
            numbers.byteswap()
        values: list[Value] = list(numbers)
        return values

    def strings(self, key: str, count: int) -> list[Value]:
        """A vocabulary holds 50,000 to 300,000 strings: one tight loop, bounds checked once per string."""
        mapped, size, at = self.mapped, self.size, self.at
        from_bytes = int.from_bytes
        texts: list[Value] = []
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + from_bytes(mapped[begin - 8 : begin], "little")
                if at > size:
                    break
                texts.append(mapped[begin:at].decode())
        except UnicodeDecodeError as error:
            raise self.error(f'"{key}": entry {len(texts)} is not UTF-8') from error
        if len(texts) != count or at > size:
            raise self.error(f'"{key}": entry {len(texts)} of {count} lies behind the file\'s end')
        self.at = at
        return texts

    def error(self, text: str) -> GgufError:
        return GgufError(f"{self.path}: {text}")
