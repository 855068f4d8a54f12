"""Compiles kernels before they are needed, many at a time. Called at start, by way of services/worker/compile.py.

`collect` notes every kernel that launchers ask for and launches none, if it is the first; it uses the hook that Triton
has for that. `build` compiles what was noted, in threads: most of a compilation holds no lock of Python's.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch
from triton import JITFunction, knobs

log = logging.getLogger("worker")


class Asked:
    """Kernels by function and specialization, each once; how to compile it is in Triton's own form."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[int, str], tuple[Any, str]] = {}

    def __len__(self) -> int:
        return len(self._kernels)

    def note(self, **kernel: Any) -> bool:
        """Triton's `jit_cache_hook`. True: the kernel is neither compiled nor launched."""
        function, form = kernel["fn"].jit_function, kernel["compile"]
        # Triton's key of a function that calls another depends on which of the two was asked first: in the order of
        # launches it is the same in every start, in the threads of `build` it would not be
        assert function.cache_key
        self._kernels[id(function), form["key"]] = function, form["specialization_data"]
        return True

    def build(self, threads: int, report: Callable[[int, int], None]) -> None:
        """Compiles all of them. What cannot be compiled fails again, and is told, where it is launched."""
        with ThreadPoolExecutor(threads, "build", *_same_device()) as pool:
            builds = [pool.submit(function.preload, form) for function, form in self._kernels.values()]
            for done, build in enumerate(as_completed(builds)):
                report(done + 1, len(builds))
                if (error := build.exception()) is not None:
                    log.debug("a kernel could not be compiled ahead: %s", error)


def _same_device() -> tuple[()] | tuple[Callable[[int], None], tuple[int]]:
    """How a new thread gets the GPU of this one: kernels are kept per device, and threads begin with the first."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return (torch.cuda.set_device, (torch.cuda.current_device(),)) if on_gpu else ()


def is_first() -> bool:
    """Whether no kernel of this package is compiled: a dry run launches those that are, on what nobody has written."""
    package = __name__.rpartition(".")[0]
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(package)]
    kernels = [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]
    return not any(compiled for kernel in kernels for compiled, *_ in kernel.device_caches.values())


@contextmanager
def collect() -> Iterator[Asked]:
    asked, before = Asked(), knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = asked.note
    try:
        yield asked
    finally:
        knobs.runtime.jit_cache_hook = before
