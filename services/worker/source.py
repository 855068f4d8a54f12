"""Opens a model: its configuration, what generation needs to know, and its checkpoint tensors, whatever the files are.

The model engine calls `open_model` once at start and gives the tensors to loader.py. Nothing is read but headers and
the configuration; tensors stay in their files until they are asked for.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import ConfigError
from common.gguf_metadata import read_gguf
from common.model_source import ModelFiles, resolve
from services.worker import gguf_config, gguf_file, safetensors_file
from services.worker.file_reader import FileReader
from services.worker.quant.contract import StoredTensor


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`config`: as config.json has it. `max_model_len`: positions that the checkpoint was made for, 0 if unknown."""

    name: str
    files: ModelFiles
    config: Mapping[str, object]
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    tensors: Mapping[str, StoredTensor]


def open_model(source: str, with_tensors: bool = True, reader: FileReader | None = None) -> ModelSource:
    """The model that `source` names (see common/model_source.py). Raises ConfigError when it cannot be used.

    Without tensors a folder need not hold any; `ModelSource.tensors` is then empty. `reader`: as in read_folder.
    """
    files = resolve(source)
    return _open_gguf(files, with_tensors) if files.kind == "gguf" else _open_folder(files, with_tensors, reader)


def _open_gguf(files: ModelFiles, with_tensors: bool) -> ModelSource:
    file = read_gguf(files.path)
    factors = None
    if record := file.tensors.get(gguf_file.ROPE_FACTORS_NAME):
        if record.storage != "F32":
            raise ConfigError(f'{files.path}: tensor "{record.name}" is stored as {record.storage}, expected F32')
        with files.path.open("rb") as content:
            content.seek(record.offset)
            factors = torch.frombuffer(bytearray(content.read(record.num_bytes)), dtype=torch.float32).tolist()
    config = gguf_config.hf_config(file, factors)
    return ModelSource(
        name=files.name,
        files=files,
        config=config,
        eos_token_ids=gguf_config.eos_token_ids(file),
        max_model_len=_max_model_len(config),
        tensors=gguf_file.read_tensors(file) if with_tensors else {},
    )


def _open_folder(files: ModelFiles, with_tensors: bool, reader: FileReader | None) -> ModelSource:
    config = _read_json(files.path / "config.json")
    generation_path = files.path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    return ModelSource(
        name=files.name,
        files=files,
        config=config,
        eos_token_ids=_token_ids(files.path, eos),
        max_model_len=_max_model_len(config),
        tensors=safetensors_file.read_folder(files.path, reader) if with_tensors else {},
    )


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return content


def _token_ids(path: Path, value: object) -> tuple[int, ...]:
    """eos_token_id as it is written in practice: absent, a number or a list of numbers."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = [entry for entry in values if isinstance(entry, int) and not isinstance(entry, bool)]
    if len(ids) != len(values):
        raise ConfigError(f"{path}: eos_token_id is {value!r}, expected a token id or a list of them")
    return tuple(sorted(set(ids)))


def _max_model_len(config: Mapping[str, object]) -> int:
    length = config.get("max_position_embeddings")
    return length if isinstance(length, int) else 0
