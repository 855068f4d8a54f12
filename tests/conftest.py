"""For all tests: Triton without a GPU, and folders whose paths leave room for the name of a socket."""

import fcntl
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

if importlib.util.find_spec("hypothesis") is not None:  # tests of kernels on a bare machine with a GPU do without
    from hypothesis import HealthCheck, settings

    # How fast values are drawn says how busy the machine is.
    settings.register_profile("patient", suppress_health_check=[HealthCheck.too_slow], deadline=None)
    settings.load_profile("patient")


def _has_gpu() -> bool:
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()):
        return False
    import torch  # seconds: only where it may find one

    return torch.cuda.is_available()


HAS_GPU = _has_gpu()


@contextmanager
def interpreted() -> Iterator[None]:
    """Triton kernels defined inside are interpreted, if there is no GPU to compile them for."""
    patch = pytest.MonkeyPatch()
    if not HAS_GPU:
        patch.setenv("TRITON_INTERPRET", "1")
    try:
        yield
    finally:
        patch.undo()


# Triton's own functions are kernels too: before anything else imports them.
if not HAS_GPU and importlib.util.find_spec("triton") is not None:
    with interpreted():
        importlib.import_module("triton")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Whether a kernel is interpreted is decided when its module is imported, and tests are importing them now.

    One process of pytest-xdist after the other: what the first has compiled, the others read.
    """
    with interpreted(), Path(__file__).open() as own:
        if "PYTEST_XDIST_WORKER" in os.environ:
            with suppress(OSError):  # no locks here: then all compile all
                fcntl.flock(own, fcntl.LOCK_EX)
        return (yield)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """pytest's own is named after user, run, process and test: too long for a socket (108 bytes, unix(7))."""
    with tempfile.TemporaryDirectory(prefix="vt-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
