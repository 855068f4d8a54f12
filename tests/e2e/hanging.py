"""`python hanging.py valence serve ...`: a real system whose worker hangs in a step when a file `hang` appears.

Where there is a file `hold`, no worker gets beyond its start. The files lie in the run directory; `hang` is taken away
by the worker that hangs, so its successor does not. Everything else is as it is: the engine is that of
the settings, its call does not return.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THIS = str(Path(__file__).resolve())


class Hanging:
    """An engine."""

    def __init__(self, engine: Any, flag: Path) -> None:
        self._engine, self._flag = engine, flag

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def execute(self, plan: Any) -> Any:
        if self._flag.exists():
            self._flag.unlink()
            while True:
                time.sleep(1000)
        return self._engine.execute(plan)


def run_worker() -> None:
    from common.config import Config
    from common.lifecycle import start
    from services.worker.process import engine_of, serve

    def make(kind: str) -> Callable[..., Any]:
        real = engine_of(kind)

        def engine(config: Config, *more: Any) -> Hanging:
            while (config.run_dir / "hold").exists():
                time.sleep(0.05)
            return Hanging(real(config, *more), config.run_dir / "hang")

        return engine

    serve(start("worker"), make)


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
