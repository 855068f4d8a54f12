"""`valence keys`: makes, lists, changes and takes back the API's keys in their file.

The only writer of the file. A change replaces it as a whole, so that a server that reads meanwhile sees the old keys
or the new ones; two commands at once wait for each other.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from common import api_keys
from common.api_keys import Key
from valence.errors import CommandError


def add(path: Path, name: str, admin: bool = False, **limits: int) -> str:
    """Makes a key and returns it; `limits` are fields of a Key, `admin` is a right.

    Raises CommandError if the name is taken, ConfigError if it cannot be a name, or a limit is out of range.
    """
    secret = api_keys.make_secret()
    key = msgspec.structs.replace(api_keys.make(name, secret, **limits), admin=admin)
    with _locked(path):
        keys = _read(path)
        if any(other.name == name for other in keys):
            raise CommandError(f"there is a key {name} already; remove it first")
        _replace(path, [*keys, key])
    return secret


def change(path: Path, name: str, **limits: int) -> None:
    """Sets some limits of a key; the others, and the key, stay.

    Raises CommandError if there is no key of that name, ConfigError if a limit is out of range.
    """
    with _locked(path):
        keys = _read(path)
        if not any(key.name == name for key in keys):
            raise CommandError(f"there is no key {name!r} in {path}")
        _replace(path, [api_keys.with_limits(key, **limits) if key.name == name else key for key in keys])


def remove(path: Path, name: str) -> None:
    """Raises CommandError if there is no key of that name."""
    with _locked(path):
        keys = _read(path)
        rest = [key for key in keys if key.name != name]
        if len(rest) == len(keys):
            raise CommandError(f"there is no key {name!r} in {path}")
        _replace(path, rest)


def listed(path: Path) -> list[dict[str, Any]]:
    """One record per key, without its hash. Raises ConfigError if there is no such file."""
    shown = [name for name in Key.__struct_fields__ if name not in ("salt", "hash")]
    return [{name: getattr(key, name) for name in shown} for key in api_keys.read(path)]


def _read(path: Path) -> list[Key]:
    return api_keys.read(path) if path.exists() else []


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CommandError(f"cannot open {path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, keys: list[Key]) -> None:
    target = path.resolve()  # a link stays one
    try:
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # of mode 0600
    except OSError as error:
        raise CommandError(f"cannot write to {target.parent}: {error.strerror}") from error
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(api_keys.write(keys))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except OSError as error:
        os.unlink(name)
        raise CommandError(f"cannot write {target}: {error.strerror}") from error
