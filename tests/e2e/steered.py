"""A real system whose workers stand still when a test says so: what is to fall under running streams surely does.

How long a restart takes, and how many tokens come meanwhile or in one event, depends on the machine. So nothing is
timed: workers take as many steps as they may, stand still in the next one, and go on when the blow has fallen.
`hanging.py` is what runs in their place; the engine is that of the settings.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.system import System
from valence import rundir
from valence.status import StatusClient

Blow = Callable[[], object]
Again = Callable[[int], bool]
LIMIT_S = 280.0  # other load makes everything slow; it is no measure
LOOK_S = 0.02
# Who stands still is not stuck, nor is what waits for it; who gets no processor for some seconds is not dead.
PATIENT = (
    *("scheduler.step_deadline_s=600", "links.stalled_after_s=600"),
    *("links.recover_s=600", "links.dead_after_s=30"),
)


class Steered(System):
    """`hang` and `hold` in its run directory make its workers hang in a step, or before they are ready."""

    def __init__(self, *settings: str, start_s: float | None = None) -> None:
        super().__init__(*PATIENT, *settings, **({} if start_s is None else {"start_s": start_s}))
        place = self._command.index("-m")
        self._command[place : place + 2] = [str(Path(__file__).with_name("hanging.py")), "valence"]
        assert self._command[0] == sys.executable
        self._allowances = 0

    def allow(self, steps: int | None) -> None:
        """So many steps from now on for each worker process; None: as many as there are."""
        self._allowances += 1
        draft, file = self.run_dir / "allowed.new", self.run_dir / "allowed"
        draft.write_text(f"{self._allowances} {10**12 if steps is None else steps}")
        os.replace(draft, file)

    def stands(self) -> bool:
        """A worker has done what it may, and waits in the step after that."""
        return (self.run_dir / f"stands.{self._allowances}").exists()

    def admitted(self) -> int:
        """Sequences that schedulers have, running or waiting."""
        with StatusClient(rundir.running_config(self.run_dir)) as client:
            loads = [each.load for each in client.ask_each().values()]
        return sum(load.running + load.waiting for load in loads)

    @contextlib.contextmanager
    def struck(self, blows: Sequence[Blow], steps: int, sequences: int = 0, again: Again = bool) -> Iterator[None]:
        """Each blow falls while the workers stand still; `steps` before the first one and between two.

        No step is done before `sequences` are admitted. `again`: whether clients have heard what came after so many
        blows; without it the next one may fall before anything has recovered. All of it in a thread while the block
        runs, which is to end only when all have fallen.
        """
        failed: list[BaseException] = []
        over = threading.Event()

        def until(holds: Callable[[], object]) -> None:
            end_s = time.monotonic() + LIMIT_S
            while not holds():
                assert time.monotonic() < end_s, "it did not come to be"
                assert not over.wait(LOOK_S), "the streams ended before all blows had fallen"

        def strike() -> None:
            try:
                if sequences:
                    until(lambda: self.admitted() >= sequences)
                for number, blow in enumerate(blows):
                    if number or sequences:
                        self.allow(steps)
                    until(self.stands)
                    until(lambda number=number: not number or again(number))
                    blow()
            except BaseException as error:  # noqa: BLE001  the test's own thread tells it
                failed.append(error)
            finally:
                self.allow(None)

        self.allow(0 if sequences else steps)
        thread = threading.Thread(target=strike)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.allow(None)
        if failed:
            raise failed[0]
