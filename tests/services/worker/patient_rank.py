"""`python -m tests.services.worker.patient_rank FD PARENT`: a real rank up to its model, for which it waits."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from common.protocol import Progress
from services.worker import rank_child
from services.worker.engine import Engine
from services.worker.ranks import Join


def engine_at(join: Join, report: Callable[[Progress], None]) -> Engine:
    (Path(join.meeting).parent / f"{os.getpid()}.waits").touch()
    while True:
        signal.pause()


if __name__ == "__main__":
    rank_child.engine_at = engine_at  # type: ignore[attr-defined]
    rank_child.main()
