"""Checkpoint tensors of a folder with safetensors files, one or sharded with an index.

`read_folder` opens and checks every file's header (the safetensors library validates offsets and sizes) and gives the
tensors by name; each is read from its mapped file only when `dense` is called.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.errors import ConfigError
from services.worker.quant.contract import StoredTensor
from services.worker.quant.narrow import narrowed_shape

PLAIN_NAME = re.compile(r"[^/\\\0]+\.safetensors")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FLOAT_STORAGE = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """A StoredTensor of one safetensors file. `window`: the part of it that is read; (): all."""

    name: str
    shape: tuple[int, ...]
    storage: str
    path: Path
    handle: Any  # safe_open's handle has no published type
    window: tuple[slice, ...] = ()

    @property
    def source(self) -> str:
        return str(self.path)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        if self.storage not in FLOAT_STORAGE:
            raise ConfigError(f'{self.path}: tensor "{self.name}" is stored as {self.storage}, which is not supported')
        stored: torch.Tensor = self.handle.get_tensor(self.name)
        return stored[self.window].to(dtype=dtype, copy=True)

    def raw(self) -> torch.Tensor:
        stored: torch.Tensor = self.handle.get_tensor(self.name)
        return stored[self.window].clone()

    def narrow(self, dim: int, begin: int, end: int) -> StoredTensor:
        """Only the pages of the mapped file that hold this part are read."""
        window = list(self.window or (slice(0, size) for size in self.shape))
        first = window[dim].start
        window[dim] = slice(first + begin, first + end)
        return replace(self, shape=narrowed_shape(self.shape, dim, begin, end), window=tuple(window))

    def entry(self, index: int) -> torch.Tensor:
        part: torch.Tensor = self.handle.get_slice(self.name)[index]
        return part

    def blocks(self) -> torch.Tensor:
        raise ValueError(f'tensor "{self.name}" is stored as {self.storage}, not in blocks')


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the safetensors files in `folder` by name. Raises ConfigError naming the file at fault."""
    index = folder / INDEX_NAME
    if index.is_file():
        return _read_sharded(folder, index)
    single = folder / SINGLE_NAME
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        other = next((path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLES), "")
        hint = f"; {other} is a pickle, which could run any code and is never opened: convert it" if other else ""
        raise ConfigError(f"{folder} holds no .safetensors file{hint}")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_file(file).items():
            if name in tensors:
                raise ConfigError(f'tensor "{name}" is both in {tensors[name].source} and in {file}')
            tensors[name] = tensor
    return tensors


def _read_sharded(folder: Path, index: Path) -> dict[str, StoredTensor]:
    shard_of = _weight_map(index)
    shards: dict[str, Mapping[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, file_name in shard_of.items():
        if file_name not in shards:
            shards[file_name] = _read_file(folder / file_name)
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


def _read_file(path: Path) -> dict[str, StoredTensor]:
    try:
        handle: Any = safe_open(path, framework="pt", device="cpu")
        tensors: dict[str, StoredTensor] = {}
        for name in handle.keys():  # noqa: SIM118
            place = handle.get_slice(name)
            tensors[name] = SafetensorsTensor(name, tuple(place.get_shape()), place.get_dtype(), path, handle)
        return tensors
    except (SafetensorError, OSError, ValueError) as error:  # a name may be none that a file system takes
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
