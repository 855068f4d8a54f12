"""The caches of everything that a start compiles, and the turn to compile it: one builder per node.

Owner: the engine. A start that finds nothing ready compiles alone on its node; the others wait for it, then find all of
it ready and start side by side. AITER's caches are led here before AITER is imported, and stale locks are removed.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common import env
from common.config import Config
from services.worker import build_locks
from services.worker.aiter_cache import AiterCache, aiter_version
from services.worker.build_locks import Presence
from services.worker.compile_cache import MANIFEST, CompileCache

log = logging.getLogger("worker")

Stage = Callable[[str, int, int], None]


def cache_root(config: Config) -> Path:
    return Path(config.worker.cache_dir) if config.worker.cache_dir else env.user_cache()


class Builders:
    """What a start builds into. `compiled`: the folder of inductor and Triton; `aiter`: AITER's, where it is used."""

    def __init__(self, root: Path, compiled: CompileCache, own: AiterCache | None) -> None:
        self._root, self._compiled, self.aiter = root, compiled, own
        self._presence = Presence(own.folder) if own is not None else None

    @property
    def watched(self) -> Path:
        """Where a build leaves signs of life."""
        return self.aiter.folder if self.aiter is not None else self._compiled.folder

    def is_ready(self) -> bool:
        """Whether a whole start has been here before."""
        return (self._compiled.folder / MANIFEST).is_file()

    @contextmanager
    def turn(self, stage: Stage) -> Iterator[None]:
        """While this start may compile. Seals the cache at an orderly end."""

        def waiting(waited_s: float, holder: str) -> None:
            if waited_s < build_locks.WAIT_S:
                log.info("waits until another worker has compiled (pid %s)", holder or "unknown")
            stage("another worker compiles", int(waited_s), 0)

        with ExitStack() as stack:
            alone = True
            try:
                alone = stack.enter_context(build_locks.turn(self._root, self.is_ready, waiting))
            except OSError as error:
                log.warning("no turns to compile in %s: %s", self._root, error.strerror)
            self.sweep(stage, patient=alone)
            yield
            self._compiled.seal()

    def sweep(self, stage: Stage, patient: bool) -> None:
        """Removes locks of AITER's that nobody holds; waits for the others if `patient`."""
        if self.aiter is None:
            return
        begun_s = time.monotonic()
        while True:
            removed, held = build_locks.clean(self.aiter.folder, self._presence)
            for path in removed:
                log.warning("removed a lock of a build that is dead: %s", path)
            if not held or not patient:
                return
            stage("another build holds a lock", int(time.monotonic() - begun_s), 0)
            time.sleep(build_locks.WAIT_S)


def open_aiter(config: Config, arch: str, root: Path) -> AiterCache | None:
    """Leads AITER's caches into ours, where it may be used. Where that fails AITER keeps its own."""
    if "aiter" not in config.worker.kernels or not arch.startswith("gfx") or not aiter_version():
        return None
    cache = AiterCache(root, arch)
    try:
        cache.prepare()
    except OSError as error:
        log.warning("AITER builds in a folder of its own, at every start in a fresh container: %s", error)
        return None
    in_force = env.set_defaults(cache.environment)
    if theirs := sorted(name for name, value in cache.environment.items() if in_force[name] != value):
        log.info("AITER: %s as set from outside", ", ".join(theirs))
    log.info("AITER %s builds in %s", aiter_version(), cache.folder)
    return cache


def open_builders(config: Config, compiled: CompileCache, arch: str) -> Builders:
    root = cache_root(config)
    return Builders(root, compiled, open_aiter(config, arch, root))
