"""What vectors a checkpoint was made for: sentence-transformers' files beside the weights, a GGUF file's metadata, else
the last token's hidden state at length 1. Settings come before both. Called once, when a model is loaded.

Files that ask for what is not done here refuse vectors with the reason, and nothing else.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.config import Model
from common.gguf_metadata import read_gguf
from common.model_source import ModelFiles
from common.pooling import Embedding, Mode

MODULES = "modules.json"
POOLING = "1_Pooling"
DONE = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers' modules
PREFIX = "pooling_mode_"
NAMES: dict[str, Mode] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
GGUF_TYPES: dict[int, Mode] = {1: "mean", 3: "last"}  # llama.cpp's numbers; 0 says nothing
GGUF_NAMES = {2: "cls", 4: "rank"}


class Unfit(Exception):
    """The checkpoint wants what is not done here; the text says what."""


def embedding_of(settings: Model, files: ModelFiles, config: Mapping[str, object], size: int) -> Embedding:
    """`config`: as config.json has it. size: of a hidden state."""
    lengths = _lengths(config, settings.matryoshka)
    mode: Mode = "last"
    normalize = True
    try:
        if settings.pooling == "auto" or settings.normalize == "auto":
            mode, normalize = _of_gguf(files.path) if files.kind == "gguf" else _of_folder(files.path)
    except Unfit as fault:
        if settings.pooling == "auto":
            return Embedding(lacks=f"{fault}; model.pooling can name another way")
    mode = mode if settings.pooling == "auto" else settings.pooling
    return Embedding(size, mode, normalize if settings.normalize == "auto" else settings.normalize == "on", lengths)


def _lengths(config: Mapping[str, object], any_length: bool) -> tuple[int, ...] | None:
    """vLLM's keys of config.json."""
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list) and listed and all(type(each) is int and each > 0 for each in listed):
        return tuple(sorted(listed))
    return () if any_length or config.get("is_matryoshka") is True else None


def _of_gguf(path: Path) -> tuple[Mode, bool]:
    metadata = read_gguf(path).metadata
    number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    kind = number if isinstance(number, int) else 0
    if kind in GGUF_NAMES:
        raise Unfit(f"{path.name} pools by {GGUF_NAMES[kind]}")
    return GGUF_TYPES.get(kind, "last"), True


def _of_folder(folder: Path) -> tuple[Mode, bool]:
    """Raises Unfit."""
    normalize, place = True, POOLING
    if (folder / MODULES).is_file():
        modules = _read(folder / MODULES, list[dict[str, Any]])
        kinds = {str(each.get("type", "")).rpartition(".")[2]: str(each.get("path", "")) for each in modules}
        if unknown := [kind for kind in kinds if kind not in DONE]:
            raise Unfit(f"{MODULES} has {unknown[0]!r:.80}, which is not computed here")
        normalize, place = "Normalize" in kinds, kinds.get("Pooling", POOLING)
    if Path(place).is_absolute() or ".." in Path(place).parts or "\0" in place:
        raise Unfit(f"{MODULES} names a folder outside of the model's, {place!r:.80}")
    file = folder / place / "config.json"
    return (_mode(_read(file, dict[str, Any])) if file.is_file() else "last"), normalize


def _mode(values: dict[str, Any]) -> Mode:
    """Either one name, or a flag for each."""
    flags = [key.removeprefix(PREFIX) for key, value in values.items() if key.startswith(PREFIX) and value is True]
    named = values.get("pooling_mode")
    wanted = [named] if isinstance(named, str) else named if isinstance(named, list) else flags
    if len(wanted) != 1 or wanted[0] not in NAMES:
        raise Unfit(f"{POOLING} pools by {', '.join(map(str, wanted)) or 'nothing'!s:.80}")
    return NAMES[wanted[0]]


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unfit(f"{path.name} cannot be read: {error}") from error
