"""Who builds kernels in a shared folder, and which of AITER's lock files nobody holds any more.

AITER and ninja mark a build by files that only the builder removes: if it is killed, others wait for ever. Which pid
made a file tells little (containers have the same pids and, with the host's network, the same name), so ours hold
kernel locks (flock), which end with their process: `Presence` for life, `Turn` while a start may build. A mark is stale
if no process of ours is there that may have made it, or if nothing beside it has changed for QUIET_S: a foreign
builder's may be live.
"""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger("worker")

USERS = "users"
QUIET_S = 900.0  # longer than any single compilation that was seen
WAIT_S = 0.5
# Below AITER's folder: its batons around a module and around an extension, ninja's, those of its template ops; and the
# mark of a process that is about to break one.
MARKS = (
    "jit/build/lock_*",
    "jit/build/*/build/lock",
    "jit/build/*/build/lock.steal",
    "jit/build/*/build/.ninja_lock",
    "root/build/*/lock",
    "root/build/*/lock.steal",
    "root/build/*/*.lock",
    "root/build/*/*.lock.steal",
)


class Presence:
    """This process uses the folder: a file below it, locked for as long as the process lives or until `end`."""

    def __init__(self, folder: Path) -> None:
        users = folder / USERS
        users.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{os.getpid()}.{time.monotonic_ns():x}"
        draft, self.path = users / f".{name}", users / name
        self._descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT, 0o600)
        _lock(self._descriptor, fcntl.LOCK_EX)
        draft.rename(self.path)  # nobody ever finds it without its lock

    def end(self) -> None:
        self.path.unlink(missing_ok=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def present_since(folder: Path, own: Presence | None = None) -> list[float]:
    """Since when each other live process of ours uses the folder (wall clock); forgets those that have died."""
    found: list[float] = []
    for path in sorted((folder / USERS).glob("[0-9]*")):
        if own is not None and path == own.path:
            continue
        with suppress(FileNotFoundError), path.open("rb") as file:
            if _lock(file.fileno(), fcntl.LOCK_EX):
                path.unlink()
            else:
                found.append(path.stat().st_mtime)
    return found


def marks(folder: Path) -> list[Path]:
    return sorted({path for pattern in MARKS for path in folder.glob(pattern) if path.is_file()})


def clean(folder: Path, own: Presence | None = None, now_s: float | None = None) -> tuple[list[Path], list[Path]]:
    """Removes stale marks. Returns those, and the ones that a live process may hold."""
    now_s = time.time() if now_s is None else now_s
    others = present_since(folder, own)
    removed, held = [], []
    for path in marks(folder):
        with suppress(FileNotFoundError):
            made_s = path.stat().st_mtime
            if not others or made_s < min(others) or now_s - last_change(path) > QUIET_S:
                path.unlink()
                removed.append(path)
            else:
                held.append(path)
    return removed, held


def last_change(mark: Path) -> float:
    """When anything of the build behind the mark changed last: for a module's baton, in the module's own folder too."""
    module = mark.parent / mark.name.removeprefix("lock_")
    places = [mark.parent if mark.name in ("lock", ".ninja_lock") else mark, module]
    latest = mark.stat().st_mtime
    for place in places:
        for folder, _, names in os.walk(place):
            for name in names:
                with suppress(OSError):
                    latest = max(latest, os.stat(os.path.join(folder, name)).st_mtime)
    return latest


class Turn:
    """The right to build on this node: alone (`exclusive`), or beside others that find all of it ready."""

    def __init__(self, root: Path) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = root / "build.lock"
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)

    def take(self, exclusive: bool) -> bool:
        """False if others have theirs."""
        if _lock(self._descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) is False:
            return False
        if exclusive:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        return True

    def holder(self) -> str:
        """The pid of the last one that had it alone."""
        with suppress(OSError):
            return self.path.read_text().strip()
        return ""

    def end(self) -> None:
        os.close(self._descriptor)


@contextmanager
def turn(root: Path, is_ready: Callable[[], bool], waiting: Callable[[float, str], None]) -> Iterator[bool]:
    """Holds a turn: alone unless everything is ready. Yields whether it is alone.

    `waiting` is called about twice a second, with seconds waited and the builder's pid. A node where files cannot be
    locked builds without turns.
    """
    own, begun_s = Turn(root), time.monotonic()
    try:
        exclusive = not is_ready()
        while not own.take(exclusive):
            waiting(time.monotonic() - begun_s, own.holder())
            time.sleep(WAIT_S)
            exclusive = not is_ready()
        yield exclusive
    finally:
        own.end()


def _lock(descriptor: int, kind: int) -> bool | None:
    """False if somebody else has it; None on a file system that has no locks, where nobody knows."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            log.warning("this file system has no locks: builders of several workers may meet")
            return None
        return False
    return True
