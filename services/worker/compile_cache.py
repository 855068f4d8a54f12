"""Where compiled kernels are kept between starts: one folder per content of everything that they depend on.

Owner: the engine, at start. A folder's manifest tells the files that a whole start has left; a folder whose files are
not those is removed, so that a broken entry costs a slow start and never a failed one. Old folders are pruned.
"""

import errno
import hashlib
import importlib.metadata
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

log = logging.getLogger("worker")

KEPT = 4  # folders, the present one included
SOURCES = ("models", "layers", "kernels", "quant")
LIBRARIES = ("torch", "triton", "pytorch-triton-rocm", "aiter", "amd-aiter")
MANIFEST = "manifest.json"


def content_key(arch: str, model: Mapping[str, Any], root: Path = Path(__file__).parent) -> str:
    """Equal as long as our sources below `root`, the libraries, the GPU and the model's configuration are."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    for name in LIBRARIES:
        digest.update(f"{name} {_version(name)}\0".encode())
    digest.update(f"{torch.__version__} {torch.version.cuda} {torch.version.hip} {arch}\0".encode())
    digest.update(msgspec.json.encode(model, order="deterministic"))
    return digest.hexdigest()[:24]


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


class CompileCache:
    """The folder of one key. `folder` exists and can be written."""

    def __init__(self, root: Path, key: str) -> None:
        """Where `root` cannot be written, kernels are kept for this process only."""
        try:
            self.folder = self._prepare(root / key)
            _prune(root, self.folder)
        except OSError as error:
            log.warning("compiled kernels cannot be kept in %s (%s): every start compiles them", root, error.strerror)
            self.folder = Path(tempfile.mkdtemp(prefix="valence-kernels-"))

    def _prepare(self, folder: Path) -> Path:
        if (reason := broken(folder)) is not None:
            log.warning("the kernel cache %s is broken and is made anew: %s", folder, reason)
            _remove(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place in (folder, folder.parent):
            found = place.stat()
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH:
                raise PermissionError(errno.EPERM, "others can put code there")
        os.utime(folder)  # the order in which folders are pruned
        return folder

    def seal(self) -> None:
        """Everything that a start needs is there: what differs from it later is broken."""
        manifest = {}
        try:
            for name in _files(self.folder):
                with suppress(FileNotFoundError):  # another worker's draft
                    manifest[name] = _digest(self.folder / name)
            draft = self.folder / f"{MANIFEST}.{os.getpid()}.tmp"
            draft.write_bytes(msgspec.json.encode(manifest))
            draft.replace(self.folder / MANIFEST)
        except OSError as error:
            log.warning("the kernel cache %s cannot be sealed: %s", self.folder, error.strerror)


def broken(folder: Path) -> str | None:
    """Why the folder's files are not those of its manifest; None if they are, or if no start has ended yet."""
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None
    try:
        manifest = msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as error:
        return f"{MANIFEST}: {error}"
    for name, wanted in manifest.items():
        try:
            if _digest(folder / name) != wanted:
                return f"{name} has changed"
        except FileNotFoundError:
            return f"{name} is missing"
    return None


def _files(folder: Path) -> Iterator[str]:
    """Names below the folder of files that stay: no locks, no drafts."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST and not name.endswith(".lock") and "tmp" not in name:
            yield name


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _prune(root: Path, present: Path) -> None:
    used: list[tuple[float, Path]] = []
    for path in root.iterdir():
        with suppress(FileNotFoundError):  # another worker has removed it
            if path != present and stat.S_ISDIR((found := path.stat()).st_mode):
                used.append((found.st_mtime, path))
    for _, path in sorted(used, reverse=True)[KEPT - 1 :]:
        log.info("removing the kernel cache %s", path)
        _remove(path)


def _remove(folder: Path) -> None:
    """Renamed first, so that nobody finds half of it. Nothing where another worker was faster."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
