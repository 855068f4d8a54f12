"""Builds AITER's modules ahead of the first start, for an image or a fresh node: `valence doctor --prebuild
gfx942,gfx950`.

Each architecture has a cache of its own (aiter_cache.py), the same that a worker on it will open, so it must be run
with the same AITER, torch, ROCm and Python. Needs ROCm's compilers and no GPU. One builder per node, like a start.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from common import env
from common.errors import ConfigError
from services.worker import build_locks
from services.worker.aiter_cache import AiterCache, aiter_package

UNITS = {"gfx942": "304", "gfx950": "256"}  # what AITER asks a GPU for where there is one
CHILD = (sys.executable, "-P", "-m", "services.worker.kernels.impl.aiter._prebuild")


class Step(NamedTuple):
    """One module of one architecture. `state`: there, building, built, failed."""

    arch: str
    module: str
    state: str
    done: int
    total: int
    why: str = ""


def prebuild(archs: list[str], pattern: str, root: Path, waiting: Callable[[float, str], None]) -> Iterator[Step]:
    """Each step as it is taken. Raises ConfigError where nothing can be built."""
    if unknown := sorted(set(archs) - UNITS.keys()):
        raise ConfigError(f"no architecture {unknown[0]!r} to build for; there are {', '.join(UNITS)}")
    if aiter_package() is None:
        raise ConfigError("AITER is not installed here: run this in the worker's image")
    for arch in archs:
        cache = AiterCache(root, arch)
        try:
            cache.prepare()
        except OSError as error:
            raise ConfigError(f"cannot build in {cache.folder}: {error.strerror or error}") from error
        with build_locks.turn(root, lambda: False, waiting):
            build_locks.clean(cache.folder)
            yield from _build(arch, pattern, cache)


def _build(arch: str, pattern: str, cache: AiterCache) -> Iterator[Step]:
    own = {"GPU_ARCHS": arch, "CU_NUM": UNITS[arch], "AITER_AOT_IMPORT": "1"}
    environment = env.with_variables({**cache.environment, **own})
    log_file = cache.folder / "prebuild.log"
    with (
        log_file.open("w") as log,
        subprocess.Popen([*CHILD, pattern], env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as child,
    ):
        try:
            assert child.stdout is not None
            for line in child.stdout:
                record: dict[str, Any] = json.loads(line)
                yield Step(arch, **record)
            status = child.wait()
        finally:
            with suppress(ProcessLookupError):
                child.kill()  # whoever asked has left
    if status != 0:
        yield Step(arch, "aiter.jit.core", "failed", 0, 0, f"ends with status {status}; see {log_file}")
