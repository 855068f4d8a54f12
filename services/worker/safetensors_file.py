"""Checkpoint tensors of a folder with safetensors files, one or sharded with an index.

`read_folder` opens and checks every file's header (the safetensors library validates offsets and sizes) and gives the
tensors by name; each is read from its file only when `dense` is called, to the device that the reader is for.
"""

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from common.errors import ConfigError
from services.worker.file_reader import FileReader, Place
from services.worker.quant.contract import StoredTensor
from services.worker.quant.narrow import narrowed_shape

PLAIN_NAME = re.compile(r"[^/\\\0]+\.safetensors")
METADATA = "__metadata__"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FLOAT_STORAGE = ("F64", "F32", "F16", "BF16")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """A StoredTensor of one safetensors file. `window`: the part of it that is read; (): all."""

    name: str
    shape: tuple[int, ...]
    storage: str
    path: Path
    offset: int  # in the file, of the whole
    whole: tuple[int, ...]
    reader: FileReader
    window: tuple[slice, ...] = ()

    @property
    def source(self) -> str:
        return str(self.path)

    @property
    def _place(self) -> Place:
        dtype = DTYPES.get(self.storage)
        if dtype is None:
            raise ConfigError(f'{self.path}: tensor "{self.name}" is stored as {self.storage}, which is not supported')
        return Place(self.path, self.offset, self.whole, dtype)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """On the reader's device."""
        if self.storage not in FLOAT_STORAGE:
            raise ConfigError(f'{self.path}: tensor "{self.name}" is stored as {self.storage}, which is not supported')
        return self.reader.read(self._place, dtype, self.window)

    def raw(self) -> torch.Tensor:
        """On the CPU, where formats take them apart."""
        return self.reader.stored(self._place, self.window)

    def narrow(self, dim: int, begin: int, end: int) -> StoredTensor:
        """Only the rows of the file that hold this part are read."""
        window = list(self.window or (slice(0, size) for size in self.shape))
        first = window[dim].start
        window[dim] = slice(first + begin, first + end)
        return replace(self, shape=narrowed_shape(self.shape, dim, begin, end), window=tuple(window))

    def entry(self, index: int) -> torch.Tensor:
        window = slice(index, index + 1), *(slice(0, size) for size in self.whole[1:])
        return self.reader.stored(self._place, window)[0]

    def blocks(self) -> torch.Tensor:
        raise ValueError(f'tensor "{self.name}" is stored as {self.storage}, not in blocks')


def read_folder(folder: Path, reader: FileReader | None = None) -> dict[str, StoredTensor]:
    """All tensors of the safetensors files in `folder` by name. Raises ConfigError naming the file at fault.

    `reader`: to the device that weights are for; the CPU if None.
    """
    reader = reader or FileReader()
    index = folder / INDEX_NAME
    if index.is_file():
        return _read_sharded(folder, index, reader)
    single = folder / SINGLE_NAME
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        other = next((path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLES), "")
        hint = f"; {other} is a pickle, which could run any code and is never opened: convert it" if other else ""
        raise ConfigError(f"{folder} holds no .safetensors file{hint}")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_file(file, reader).items():
            if name in tensors:
                raise ConfigError(f'tensor "{name}" is both in {tensors[name].source} and in {file}')
            tensors[name] = tensor
    return tensors


def _read_sharded(folder: Path, index: Path, reader: FileReader) -> dict[str, StoredTensor]:
    shard_of = _weight_map(index)
    shards: dict[str, Mapping[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, file_name in shard_of.items():
        if file_name not in shards:
            shards[file_name] = _read_file(folder / file_name, reader)
        if name not in shards[file_name]:
            raise ConfigError(f'{index} says that tensor "{name}" is in {file_name}, but it is not there')
        tensors[name] = shards[file_name][name]
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{index} cannot be read: {error}") from error
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise ConfigError(f"{index} has no weight_map")
    for name, file_name in listed.items():
        # A file name that leaves the folder would read any file of this machine.
        if not isinstance(file_name, str) or not PLAIN_NAME.fullmatch(file_name):
            raise ConfigError(
                f'{index}: the file of tensor "{name}" is {file_name!r}, not a name in this folder (*.safetensors)'
            )
    return listed


def _read_file(path: Path, reader: FileReader) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, framework="pt", device="cpu"):
            pass  # it has checked the header; where tensors lie it does not tell
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError, struct.error) as error:  # a name may be none that a file system takes
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name != METADATA:
            shape, offset = tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
            tensors[name] = SafetensorsTensor(name, shape, entry["dtype"], path, offset, shape, reader)
    return tensors
