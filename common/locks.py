"""Locks of files that end with the process that holds them, however it ends: flock(2)."""

import fcntl


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Takes the lock, LOCK_EX or LOCK_SH, or is False at once where another open file has one that excludes it.

    Raises OSError on a file system that has no locks.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
