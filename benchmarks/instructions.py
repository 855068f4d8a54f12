"""What each service executes per token and per request: instructions, counted by Valgrind, where times are too noisy.

    python -m benchmarks.instructions --json now.json
    PYTHONPATH=TREE python -P benchmarks/instructions.py --json before.json    # an older tree

All four services run, with the null worker, whose steps take so long (`--step-ms`) that every step has passed through
all of them before the next begins: messages have the same rows in every tree and run, however slow the machine is.
Streams of two lengths tell tokens from requests; what the same time costs with nothing to do is taken off. Two runs of
one tree differ by 1 or 2 %. Needs Valgrind.
"""

import argparse
import contextlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.load import stream_all
from benchmarks.report import Result, report
from benchmarks.system import System

THIS = Path(__file__).resolve()
# A process under Valgrind is slow, not dead; and what goes by the clock is to be little beside what goes by tokens.
CALM = ("links.heartbeat_s=20", "links.dead_after_s=600", "links.stalled_after_s=600", "scheduler.step_deadline_s=600")
TOTALS = re.compile(r"^totals: (\d+)", re.MULTILINE)
IDLE_S = 40.0  # two heartbeats


class CountedSystem(System):
    """Its services run under callgrind, which counts nothing before it is asked to."""

    def __init__(self, *settings: str) -> None:
        super().__init__(*settings, start_s=900.0)
        place = self._command.index("-m")
        self._command[place : place + 2] = ["-P", str(THIS), "--serve"]


def serve() -> None:
    """`valence` with the arguments of this process, its services under callgrind."""
    from valence import __main__, programs

    real = programs.service_command

    def command(program: programs.Program, config_file: Path) -> list[str]:
        output = config_file.parent / f"instructions.{program.service}"
        tool = ["--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={output}"]
        return ["valgrind", "-q", *tool, *real(program, config_file)]

    programs.service_command = command
    __main__.main()


class Spent(NamedTuple):
    """Instructions of each service in so many seconds."""

    seconds: float
    instructions: dict[str, float]


class Counter:
    """Reads the processes' counts; each reading begins the next one."""

    def __init__(self, system: System) -> None:
        self._run_dir = system.run_dir
        self._pids = {name: members[0].pid for name, members in system.processes().items()}
        self._dumps = 0
        self._since_s = 0.0

    def _ask(self, *words: str) -> None:
        for pid in self._pids.values():
            subprocess.run(["vgdb", f"--pid={pid}", *words], check=True, capture_output=True)

    def begin(self) -> None:
        self._ask("instrumentation", "on")
        self.read()

    def read(self) -> Spent:
        """What was spent since the last reading."""
        self._dumps += 1
        self._ask("dump")
        now_s = time.monotonic()
        spent = Spent(now_s - self._since_s, {name: self._total(name) for name in self._pids})
        self._since_s = now_s
        return spent

    def _total(self, name: str) -> float:
        text = (self._run_dir / f"instructions.{name}.{self._dumps}").read_text()
        found = TOTALS.search(text)
        assert found is not None, f"callgrind of {name} has written no totals"
        return float(found[1])


@contextlib.contextmanager
def unwatched(system: System) -> Iterator[None]:
    """`valence serve` is stopped: its questions twice a second cost the scheduler more than so few tokens do."""
    system.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        system.process.send_signal(signal.SIGCONT)


def supported(settings: tuple[str, ...]) -> list[str]:
    """Those settings that this tree has: older ones lack some."""
    from common.config import Config

    def has(setting: str) -> bool:
        section, _, key = setting.partition("=")[0].partition(".")
        return hasattr(getattr(Config(), section), key)

    return [setting for setting in settings if has(setting)]


def measure(streams: int, lengths: tuple[int, int], step_ms: int, keep: str) -> list[Result]:
    settings = ("worker.kind=null", f"worker.step_us={step_ms * 1000}", "scheduler.max_rows=512", *supported(CALM))
    with CountedSystem(*settings) as system:
        model = system.status()["model"]

        def run(tokens: int) -> None:
            body = {"model": model, "prompt": "hello there", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
            ended = stream_all(system.port, "/v1/completions", [body] * streams)
            if min(result.num_events for result in ended) < tokens:
                raise SystemExit("one step came before the last one was through: --step-ms must be more here")

        run(4)
        counter = Counter(system)
        with unwatched(system):
            counter.begin()
            time.sleep(IDLE_S)
            idle = counter.read()
            spent = []
            for tokens in lengths:
                run(tokens)
                spent.append(counter.read())
        if keep:
            for path in system.run_dir.glob("instructions.*"):
                shutil.copy(path, keep)
    return results(streams, lengths, idle, spent, f"{streams} streams of {lengths} tokens, a step each {step_ms} ms")


def results(streams: int, lengths: tuple[int, int], idle: Spent, spent: list[Spent], conditions: str) -> list[Result]:
    found = []
    sums = {"token": 0.0, "request": 0.0}
    for name, at_rest in idle.instructions.items():
        short, long = ((each.instructions[name] - at_rest * each.seconds / idle.seconds) / streams for each in spent)
        token = (long - short) / (lengths[1] - lengths[0])
        per = {"token": token, "request": short - token * lengths[0]}
        for unit, value in per.items():
            sums[unit] += value
            found.append(Result(f"instructions_per_{unit}_{name}", value, "1", conditions))
        found.append(Result(f"instructions_per_s_idle_{name}", at_rest / idle.seconds, "1", conditions))
    found += [Result(f"instructions_per_{unit}_services", value, "1", conditions) for unit, value in sums.items()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--streams", type=int, default=256, help="[%(default)s]")
    parser.add_argument("--lengths", type=int, nargs=2, default=(8, 72), help="output tokens of a stream [8 72]")
    parser.add_argument("--step-ms", type=int, default=400, help="[%(default)s]")
    parser.add_argument("--keep", default="", metavar="DIR", help="copy callgrind's files here, for callgrind_annotate")
    given = parser.parse_args()
    report(measure(given.streams, tuple(given.lengths), given.step_ms, given.keep), given.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        del sys.argv[1]
        serve()
    else:
        main()
