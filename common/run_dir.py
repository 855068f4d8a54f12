"""The run directory: made for this user only, and never one that somebody else made or can change.

Its mode is all that guards the ipc links, the supervisor's socket and the logs, so every process looks at it at its
start. The default lies under /tmp, where others may have been first.
"""

import os
import stat
from pathlib import Path

from common.errors import ConfigError

MAX_PATH = 80  # a socket's path has 108 bytes with its name


def others_can_write(found: os.stat_result) -> bool:
    """Whether users who are neither root nor this one may change a file or folder. A group of ours is trusted."""
    if found.st_uid not in (0, os.geteuid()):
        return True
    return bool(
        found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid not in (0, os.getegid()))
    )


def make_run_dir(path: Path) -> None:
    """Creates the run directory, mode 0700. Raises ConfigError if it, or a folder above it, is in others' hands."""
    path = Path(os.path.abspath(path))
    if len(str(path)) > MAX_PATH:
        raise ConfigError(f"the run directory {path} is too long for a socket path; set links.run_dir")
    try:
        for folder in (*reversed(path.parents), path):
            if not os.path.lexists(folder):
                _make(folder)
        check_run_dir(path)
        path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"cannot use the run directory {path}: {error.strerror}") from error


def _make(folder: Path) -> None:
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return  # a sibling was faster; who it belongs to is looked at afterwards


def check_run_dir(path: Path) -> None:
    """Raises ConfigError unless it is this user's own folder and nobody else can put another one in its place."""
    path = Path(os.path.abspath(path))
    try:
        for folder in {*path.parents, *Path(os.path.realpath(path)).parents}:
            _check_above(path, folder)
        own = os.lstat(path)
    except OSError as error:
        raise ConfigError(f"cannot use the run directory {path}: {error.strerror}") from error
    if stat.S_ISLNK(own.st_mode):
        raise ConfigError(f"the run directory {path} is a symbolic link; name the folder itself in links.run_dir")
    if not stat.S_ISDIR(own.st_mode):
        raise ConfigError(f"cannot use the run directory {path}: Not a directory")
    if own.st_uid != os.geteuid():
        raise ConfigError(
            f"the run directory {path} belongs to user {own.st_uid}, who could read and send messages in it; "
            "remove it, or set links.run_dir to another one"
        )


def _check_above(path: Path, folder: Path) -> None:
    """A folder above `path`, or a link on the way: whoever can rename in it can replace the run directory."""
    found = os.lstat(folder)
    if folder == Path("/"):
        return  # nobody can rename it
    mine = found.st_uid in (0, os.geteuid())
    safe = mine and (found.st_mode & stat.S_ISVTX or stat.S_ISLNK(found.st_mode))  # the mode of a link means nothing
    if not safe and others_can_write(found):
        who = "other users can write to it" if mine else f"it belongs to user {found.st_uid}"
        raise ConfigError(f"the run directory {path} lies in {folder}, and {who}; set links.run_dir to a safe place")
