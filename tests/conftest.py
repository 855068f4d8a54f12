"""For all tests: Triton without a GPU."""

import importlib
import importlib.util
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


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
    """Whether a kernel is interpreted is decided when its module is imported, and tests are importing them now."""
    with interpreted():
        return (yield)
