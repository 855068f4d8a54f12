"""Run directories: which one is ours, which ones are alive, what a dead run left.

A run directory belongs to whoever holds the lock on its `lock` file: `valence serve`, and its supervisor after it.
It is removed at the end of a run; what a killed run left is removed by the next run that claims it.
"""

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from common import config as configuration
from common import crash, recorder
from common.config import Config
from common.errors import ConfigError
from common.locks import try_lock
from common.run_dir import check_run_dir, make_run_dir
from valence.errors import CommandError
from valence.supervisor import Supervisor


class NotRunning(CommandError):
    """No run fits what was asked for; the text says what was looked at."""


class Claim(NamedTuple):
    """The lock on a run directory; held as long as the descriptor is open in any process."""

    path: Path
    fd: int

    def release(self, keep_logs: bool = False) -> None:
        """Removes the directory (or all but what tells what happened), then lets go."""
        for entry in self.path.iterdir():
            if not (keep_logs and entry.name in ("log", crash.FOLDER, recorder.FOLDER)):
                _remove(entry)
        if not keep_logs:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.fd)


def claim(path: Path) -> Claim:
    """Makes the directory ours and empty. Raises ConfigError if a run is alive in it."""
    if re.search("[%;#]", str(path)):
        raise ConfigError(f"the run directory {path} may hold no %, ; or #, which the supervisor reads as its own")
    while True:
        make_run_dir(path)
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not try_lock(fd):
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise ConfigError(
                f"a server is already running in {path} (valence serve, pid {owner or 'unknown'}); "
                "stop it with `valence stop`, or choose another port"
            )
        if _is_same_file(fd, path / "lock"):
            break
        os.close(fd)  # its holder removed the directory between our two calls
    for entry in path.iterdir():
        if entry.name not in ("lock", crash.FOLDER, recorder.FOLDER):  # bounded; a run that was killed can be explained
            _remove(entry)
    os.truncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return Claim(path, fd)


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def owner_pid(path: Path) -> int:
    """Process id of the `valence serve` that claimed the directory; 0 if unknown."""
    try:
        text = (path / "lock").read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def alive(root: Path) -> list[Path]:
    """Run directories under `root` in which a supervisor answers."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if Supervisor(path).alive())


def find(run_dir: str = "", port: int | None = None) -> Path:
    """The one running instance that fits. Raises NotRunning if there is none, or several to choose from."""
    root = configuration.default_run_root()
    if run_dir or port is not None:
        path = Path(run_dir) if run_dir else root / str(port)
        if path.exists():
            check_run_dir(path)  # whoever made another one could answer in the server's name
        if not Supervisor(path).alive():
            raise NotRunning(f"no server is running in {path}")
        return path
    if root.exists():
        check_run_dir(root)
    found = alive(root)
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotRunning(f"no server is running (looked in {root}); start one with `make serve`")
    choices = ", ".join(f"--port {path.name}" for path in found)
    raise NotRunning(f"several servers are running; say which: {choices}")


def find_recorded(run_dir: str = "", port: int | None = None) -> Path:
    """Where a run, living or dead, has left its records. Raises NotRunning if none has, or several have."""
    root = configuration.default_run_root()
    if run_dir or port is not None:
        path = Path(run_dir) if run_dir else root / str(port)
        if not (path / recorder.FOLDER).is_dir():
            raise NotRunning(f"no server is running in {path}, nor has one left a record there")
        return path
    if alive(root):
        return find()
    left = sorted(path.parent for path in root.glob(f"*/{recorder.FOLDER}"))
    if len(left) > 1:
        choices = ", ".join(f"--port {path.name}" for path in left)
        raise NotRunning(f"no server is running, and several have left records; say which: {choices}")
    return left[0] if left else find()


def running_config(path: Path) -> Config:
    """The settings that the run in this directory was started with."""
    return configuration.load(path / "config.toml")


def url(config: Config) -> str:
    """Where a client on this host reaches the API."""
    host = reachable(config.api.host)
    return f"http://[{host}]:{config.api.port}" if ":" in host else f"http://{host}:{config.api.port}"


def reachable(host: str) -> str:
    """An address to connect to for one to listen at."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
