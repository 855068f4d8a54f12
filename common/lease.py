"""Numbers of replicas that share one command line: each takes the lowest one that no living process of its service has.

A number belongs to whoever holds the lock on its file in the run directory. The kernel lets go of it with the process,
however that ends, in whatever container it ran; nothing is to be cleaned up and none is handed out twice.
`--instance auto` takes one, `valence health` finds by them which processes run in its own container.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError
from common.locks import try_lock

MOST = 64  # replicas of a service
SUFFIX = ".lease"


class Lease(NamedTuple):
    """The number is held as long as `fd` is open."""

    number: int
    fd: int


class Holder(NamedTuple):
    """A living process that took a number."""

    service: str
    number: int
    pid: int


def take(run_dir: Path, service: str) -> Lease:
    """The lowest free number. Raises ConfigError if there is none, or the run directory cannot hold locks."""
    for number in range(MOST):
        path = run_dir / f"{service}-{number}{SUFFIX}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if not try_lock(fd):
                os.close(fd)
                continue
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d %d" % (namespace(), os.getpid()), 0)
        except OSError as error:
            raise ConfigError(f"cannot number this process by {path}: {error.strerror}") from error
        _remove_sockets(run_dir, f"{service}-{number}")
        return Lease(number, fd)
    raise ConfigError(f"{MOST} processes of {service} run already")


def here(run_dir: Path) -> Iterator[Holder]:
    """Those in this process's own PID namespace."""
    for path in sorted(run_dir.glob(f"*-*{SUFFIX}")):
        service, _, number = path.name.removesuffix(SUFFIX).rpartition("-")
        if number.isdecimal() and (pid := _holder_here(path)):
            yield Holder(service, int(number), pid)


def namespace() -> int:
    """The PID namespace, which each container has one of its own; 0 where the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _holder_here(path: Path) -> int:
    """The pid, 0 if there is none here.

    Others' files are only read: to try their locks could make one that takes a number just now miss it.
    """
    try:
        with open(path, "rb") as file:
            written, _, pid = file.read(64).partition(b" ")
            held = written == b"%d" % namespace() and pid.isdigit() and not try_lock(file.fileno())
            return int(pid) if held else 0
    except OSError:
        return 0


def _remove_sockets(run_dir: Path, name: str) -> None:
    """What a predecessor of this number left that was killed. Whoever owns the number owns them."""
    for path in run_dir.glob(f"{name}.*"):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
