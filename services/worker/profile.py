"""What torch's profiler saw of a worker's steps, as a file for chrome://tracing or Perfetto. One at a time.

The engine owns it and tells it of each step. It ends by itself after MOST_STEPS, since all that it sees is in memory.
"""

import logging
import os
import time
from pathlib import Path

import torch

log = logging.getLogger("worker")
MOST_STEPS = 500


class Profile:
    """Without a `folder` it is none."""

    def __init__(self, folder: Path | None) -> None:
        """Begins. A folder that cannot be made is told in the log: a profile is not worth a worker."""
        self.folder = folder
        self.file: Path | None = None  # while it records
        self._steps = 0
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.error("no profile: %s", error)
            return
        self.file = folder / f"worker-{os.getpid()}-{time.monotonic_ns()}.json"
        self._torch = torch.profiler.profile()
        self._torch.start()
        log.info("recording a profile of up to %d steps", MOST_STEPS)

    def step(self) -> None:
        """A step begins."""
        if self.file is not None:
            self._steps += 1
            if self._steps > MOST_STEPS:
                self.end()

    def end(self) -> None:
        """Writes the file; repeating it is harmless."""
        if self.file is None:
            return
        file, self.file = self.file, None
        self._torch.stop()
        try:
            self._torch.export_chrome_trace(str(file))
            log.info("profile of %d steps: %s", self._steps, file)
        except (OSError, RuntimeError) as error:
            log.error("the profile could not be written: %s", error)
