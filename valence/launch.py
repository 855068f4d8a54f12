"""`python -m valence.launch SIGNAL PARENT MODULE ARGS...`: runs a module in this process, which ends with its parent.

The supervisor and the services are started this way, so that nothing outlives a `valence serve` that was killed:
the kernel sends SIGNAL to the process when its parent dies (Linux only). PARENT is the parent's pid, 0 if unknown.
"""

import contextlib
import ctypes
import io
import os
import resource
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1
OPEN_FILES = 65_536


def end_with_parent(number: int, parent: int) -> None:
    """Asks the kernel for signal `number` at the parent's death. Ends at once if the parent is already dead."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    orphaned = os.getppid() != parent if parent else os.getppid() == 1
    if orphaned:
        sys.exit("the parent process is gone")


def raise_file_limit() -> None:
    """Each open request is a descriptor; the usual soft limit of 1,024 is one that select() needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class LastResort(io.TextIOBase):
    """Standard error that never fails: what cannot be written is lost.

    Whoever cannot write a log says so here, often on the same full disk. The supervisor ended of it, and all with it.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def main() -> None:
    _, signal_name, parent, module, *arguments = sys.argv
    end_with_parent(signal.Signals[signal_name], int(parent))
    raise_file_limit()
    sys.stderr = LastResort()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
