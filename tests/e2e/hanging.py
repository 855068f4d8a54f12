"""`python hanging.py valence serve ...`: a real system whose workers stand still when files of its run dir say so.

`hang`: the next step does not end; taken away by the worker that hangs, so its successor does not. `hold`: no worker
gets beyond its start. `allowed`: "NUMBER STEPS", so many steps of each worker since NUMBER was first there; who waits
in the one after these makes `stands.NUMBER`. Everything else is as it is. steered.py writes the files.
"""

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

THIS = str(Path(__file__).resolve())
LOOK_S = 0.02


class Hanging:
    """An engine, of one process or of a group's first rank."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self._number = "0"
        self._done = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def execute(self, plan: Any) -> Any:
        while self._done >= self._allowed():
            (self._folder / f"stands.{self._number}").touch()
            time.sleep(LOOK_S)
        self._done += 1
        with contextlib.suppress(FileNotFoundError):
            (self._folder / "hang").unlink()
            while True:
                time.sleep(1000)
        return self._engine.execute(plan)

    def _allowed(self) -> float:
        try:
            number, steps = (self._folder / "allowed").read_text().split()
        except FileNotFoundError:
            return float("inf")
        if number != self._number:
            self._number, self._done = number, 0
        return int(steps)


def run_worker() -> None:
    from common.config import Config
    from common.lifecycle import Process, start
    from services.worker import process
    from services.worker.engine import MakeEngine

    class Steered(process.WorkerProcess):
        def __init__(self, own: Process, make: MakeEngine) -> None:
            def engine(config: Config, *more: Any) -> Any:
                while (config.run_dir / "hold").exists():
                    time.sleep(LOOK_S)
                return Hanging(make(config, *more), config.run_dir)

            super().__init__(own, engine)

    process.WorkerProcess = Steered  # type: ignore[misc]
    process.serve(start("worker"))


def run_valence() -> None:
    from valence import __main__, programs
    from valence.programs import Program

    real = programs.service_command

    def command(program: Program, config_file: Path) -> list[str]:
        if program.service != "worker":
            return real(program, config_file)
        own = [sys.executable, "-P", THIS, "worker"]
        return [*own, "--instance", str(program.instance), "--config", str(config_file)]

    programs.service_command = command
    __main__.main()


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    if kind == "valence":
        run_valence()
    else:
        run_worker()
