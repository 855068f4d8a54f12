"""All that a GPU has to show, in minutes: op tests, kernels, the step of three models, serving, a long prompt.

Each part is a process with its own time limit; a part that fails or takes too long does not stop the next. The folder
gets `log.txt` (all output), `results.json` (all figures so far) and pictures; the summary comes last. While the tests
of the ops that these models run are red no speed is measured, unless `--despite-gate` asks for it. Only
by name run `other-ops` (those of other models and formats), `other-dtypes`, `tokens` and `chain`.

    python -m benchmarks.gpu --out DIR [--minutes 9] [--only step,serve-8b] [--set worker.compile_level=0]
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.peers import PEERS
from benchmarks.shapes import LLAMA_8B, QWEN3_30B_A3B, QWEN3_600M

ROOT = Path(__file__).parents[1]
OP_TESTS = "tests/services/worker/kernels/impl/triton"
ON_DEVICE = ("-m", "on_device")  # the other tests of kernels are CI's
MEASURED = (*ON_DEVICE, "-k", "bfloat16 or not torch.")  # a test per dtype, but for those that have none
TOKEN_TESTS = "tests/gpu"
OTHERS = (  # what says of a test that no bf16 model of the table runs its kernel
    "narrow", "quantize", "scaled", "int4", "int8", "mxfp", "latent", "mla", "index", "delta", "conv", "gated_rms",
    "clamped", "biased", "grouped", "sigmoid", "draft", "ngram", "mask_logits",
)  # fmt: skip
# What the services carry beside a worker that computes nothing.
CHAIN = ("--model", "0.6b", "--concurrency", "64,256", "--set=worker.kind=null", "--set=worker.step_us=0")
INTERRUPT_S = 15.0  # from the interrupt to the kill
SETTINGS = ('worker.kernels=["triton","torch"]',)  # the others are not for this machine, and dear to import
LEAST_S = 20.0  # a part is not begun with less time left
TAIL = 1000  # characters of a failed part in the summary
MOST_KERNELS = 6  # of a traced stretch in the summary
NAMES = {"0.6b": QWEN3_600M.name, "8b": LLAMA_8B.name, "30b-a3b": QWEN3_30B_A3B.name}


class Part(NamedTuple):
    """`command`: arguments of Python. `settings`: whether it takes `--set`; `picture`: whether it takes `--plot`.

    `asked`: it runs only when `--only` names it.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    settings: bool = False
    picture: bool = False
    asked: bool = False


class Outcome(NamedTuple):
    part: Part
    status: str  # ok, failed (exit status), out of time, not begun
    seconds: float
    output: str


def op_tests(measured: bool) -> list[str]:
    """Files with the tests of the kernels that the three models run, or of the others."""
    found = sorted(path.name for path in (ROOT / OP_TESTS).glob("test_*.py"))
    return [f"{OP_TESTS}/{name}" for name in found if measured != any(word in name for word in OTHERS)]


def tests(name: str, paths: Sequence[str], limit_s: float, *selected: str) -> Part:
    workers = ["-n", str(len(os.sched_getaffinity(0)))] if importlib.util.find_spec("xdist") else []
    options = ["-o", "addopts=", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-W", "default"]
    return Part(name, ("-m", "pytest", *options, "--tb=line", *selected, *workers, *paths), limit_s)


def parts() -> list[Part]:
    found = [
        tests("ops", op_tests(True), 150, *MEASURED),
        Part("kernels", ("-m", "benchmarks.kernels"), 100, picture=True),
    ]
    for model, limit_s, profile in (("0.6b", 90, "1,256,prefill"), ("8b", 100, "1,256"), ("30b-a3b", 120, "1,256")):
        command = ("-m", "benchmarks.step", "--model", model, "--profile", profile)
        found.append(Part(f"step-{model}", command, limit_s, settings=True, picture=True))
    for model, limit_s in (("0.6b", 75), ("8b", 100)):
        command = ("-m", "benchmarks.serve", "--model", model, "--start-s", "90")
        found.append(Part(f"serve-{model}", command, limit_s, settings=True, picture=True))
    options = ("-m", "benchmarks.serve", "--model", "0.6b", "--workload", "long-prompt", "--start-s", "90")
    found.append(Part("long-0.6b", options, 60, settings=True))
    found.append(Part("chain", ("-m", "benchmarks.serve", *CHAIN), 90, asked=True))
    found.append(tests("tokens", [TOKEN_TESTS], 240)._replace(asked=True))
    found.append(tests("other-ops", op_tests(False), 240, *ON_DEVICE)._replace(asked=True))
    found.append(tests("other-dtypes", op_tests(True), 240, *ON_DEVICE)._replace(asked=True))
    return found


class Runner:
    """Runs parts one after the other; keeps the folder up to date after each."""

    def __init__(self, out: Path, seconds: float, settings: Sequence[str]) -> None:
        self.out = out
        self.settings = settings
        self.end_s = time.monotonic() + seconds
        self.outcomes: list[Outcome] = []
        self.results: dict[str, Any] = {}  # by part, as it wrote them
        self._log = (out / "log.txt").open("w")

    def run(self, part: Part) -> Outcome:
        limit_s = min(part.limit_s, self.end_s - time.monotonic() - INTERRUPT_S)
        if limit_s < min(LEAST_S, part.limit_s):
            return self._keep(Outcome(part, "not begun: no time left", 0.0, ""))
        json_path = self.out / "part.json"
        json_path.unlink(missing_ok=True)
        command = [sys.executable, *part.command]
        if part.command[1] != "pytest":
            command += ["--json", str(json_path)]
        if part.settings:
            command += [f"--set={setting}" for setting in (*SETTINGS, *self.settings)]
        if part.picture:
            command += ["--plot", str(self.out / f"{part.name}.png")]
        self._say(f"\n===== {part.name}, at most {limit_s:.0f} s: {' '.join(command)}\n")
        start_s = time.monotonic()
        status, output = self._follow(command, limit_s)
        outcome = self._keep(Outcome(part, status, time.monotonic() - start_s, output))
        if json_path.exists():
            self.results[part.name] = json.loads(json_path.read_text())
            json_path.unlink()
            (self.out / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")
        return outcome

    def skip(self, part: Part, why: str) -> None:
        self._keep(Outcome(part, f"not begun: {why}", 0.0, ""))

    def _keep(self, outcome: Outcome) -> Outcome:
        self.outcomes.append(outcome)
        self._say(f"----- {outcome.part.name}: {outcome.status}, {outcome.seconds:.1f} s\n")
        return outcome

    def _follow(self, command: Sequence[str], limit_s: float) -> tuple[str, str]:
        """Status and output of a command, which is shown as it comes."""
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert process.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=self._copy, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            process.wait(limit_s)
            status = "ok" if process.returncode == 0 else f"failed ({process.returncode})"
        except subprocess.TimeoutExpired:
            status = "out of time"
            process.send_signal(signal.SIGINT)  # so that a server it started is ended too
            try:
                process.wait(INTERRUPT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it has left behind
        reader.join(2)
        if not reader.is_alive():
            process.stdout.close()
        return status, "".join(lines)

    def _copy(self, source: IO[str], lines: list[str]) -> None:
        for line in source:
            lines.append(line)
            self._say(line)

    def _say(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._log.write(text)
        self._log.flush()

    def close(self) -> None:
        self._log.close()


def value_of(results: Mapping[str, float], name: str, peer: float | None = None, goal: float | None = None) -> str:
    """A cell: the figure, how many times the peer's it is, and a star where the goal is met."""
    value = results.get(name)
    if value is None:
        return "-"
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
    if peer:
        text += f" ({value / peer:.2f}x)"
    return text if goal is None else f"{text}{'*' if value >= goal else ' '}"


def values_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Figures by name; those of kernels are the sums over a decode step."""
    found = {str(r["name"]): float(r["value"]) for part in results.values() if isinstance(part, list) for r in part}
    models = {name: model for model, name in NAMES.items()}
    for step in results.get("kernels", {}).get("steps", []):
        found[f"kernels_{models[step['model']]}_{step['tokens']}_ms"] = step["ms"]
    return found


def summary(outcomes: Sequence[Outcome], results: Mapping[str, Any]) -> list[Table]:
    """What ran, and the table of the design: ours with times vLLM's; a star where a goal is met."""
    ran = Table(title="parts")
    for name in ("part", "status", "s"):
        ran.add_column(name, no_wrap=True)
    for outcome in outcomes:
        ran.add_row(outcome.part.name, outcome.status, f"{outcome.seconds:.0f}")
    values = values_of(results)
    figures = Table(title="ours (times vLLM's); * goal met")
    figures.add_column("", no_wrap=True)
    for model in NAMES:
        figures.add_column(NAMES[model], justify="right", no_wrap=True)
    for label, cells in rows(values):
        figures.add_row(label, *cells)
    return [ran, figures]


def kernel_lines(results: Mapping[str, Any]) -> list[str]:
    """For each traced stretch its launches and the kernels that take most of it, us per step."""
    found: dict[str, list[str]] = {}
    for part in results.values():
        for result in part if isinstance(part, list) else ():
            stretch, _, kernel = result["name"].partition(":")
            if result["unit"] == "us/step":
                found.setdefault(stretch, [str(result["conditions"])]).append(f"{kernel} {result['value']:.0f}")
    return ["; ".join(texts[: MOST_KERNELS + 1]) for texts in found.values()]


def rows(values: Mapping[str, float]) -> list[tuple[str, list[str]]]:
    peers = {model: PEERS[name] for model, name in NAMES.items()}
    found: list[tuple[str, list[str]]] = []
    # Less is better here, so figure and goal change sides.
    cells = []
    for model, peer in peers.items():
        value = values.get(f"step_{model}_batch_1")
        met = "*" if value is not None and value <= peer.goal_ms else ""
        cells.append("-" if value is None else f"{value:.3f} (goal {peer.goal_ms}, vLLM {peer.token_ms}){met}")
    found.append(("batch 1, ms/token", cells))
    for count in (16, 64, 256, 512):
        cells = [
            value_of(
                values, f"step_{model}_{count}_sequences", peer.offline[count], peer.offline[count] * peer.goals[count]
            )
            for model, peer in peers.items()
        ]
        found.append((f"offline {count}, tok/s", cells))
    cells = [value_of(values, f"step_{m}_prefill_64_x_2048", p.prefill, p.prefill) for m, p in peers.items()]
    found.append(("prefill 64 x 2048, tok/s", cells))
    for count, name in ((1, "batch_1"), (256, "256_sequences_decode_step")):
        cells = [
            f"{value_of(values, f'kernels_{model}_{count}_ms')}, {value_of(values, f'step_{model}_{name}')}"
            for model in NAMES
        ]
        found.append((f"step of {count}, ms: kernels alone, measured", cells))
    for what in ("1", "256"):
        cells = [value_of(values, f"step_{model}_decode_of_{what}_idle") for model in NAMES]
        found.append((f"idle % at {what}", cells))
    found.append(("start-up, s", [value_of(values, f"step_{model}_start-up") for model in NAMES]))
    found.append(("served: ready after, s", [value_of(values, f"serve_{model}_ready_s") for model in NAMES]))
    for concurrency in (1, 64, 256):
        cells, latencies = [], []
        for model, peer in peers.items():
            served = peer.served.get(concurrency)
            prefix = f"serve_{model}_random_c{concurrency}"
            cells.append(value_of(values, f"{prefix}_output_tokens_per_s", served.output_per_s if served else None))
            ttft, p50 = value_of(values, f"{prefix}_ttft_ms_p50"), value_of(values, f"{prefix}_itl_ms_p50")
            latencies.append(f"{ttft}, {p50}/{value_of(values, f'{prefix}_itl_ms_p99')}")
        found.append((f"served {concurrency}, tok/s", cells))
        found.append(("  TTFT, ITL p50/p99 ms", latencies))
    long = [value_of(values, f"serve_0.6b_long_prompt_{name}") for name in ("rise_p99_ms", "chunk_ms", "ttft_s")]
    found.append(("long prompt: p99 rise, chunk ms, TTFT s", [", ".join(long), "", ""]))
    return found


def chosen(only: str) -> list[Part]:
    """Parts whose name begins with one of the words."""
    words = [word for word in only.split(",") if word]
    return [p for p in parts() if any(map(p.name.startswith, words)) or not (words or p.asked)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", default="", help="beginnings of names of parts")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="settings of the services")
    parser.add_argument("--despite-gate", action="store_true", help="measure although op tests fail")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(arguments.out, 60 * arguments.minutes, arguments.set)
    gate_red = False
    for part in chosen(arguments.only):
        if gate_red and not arguments.despite_gate:
            runner.skip(part, "the op tests are red")
            continue
        outcome = runner.run(part)
        gate_red |= part.name == "ops" and outcome.status.startswith("failed")
    runner.close()
    console = Console(highlight=False, width=120)
    for outcome in runner.outcomes:
        if outcome.status.startswith(("failed", "out of time")):
            console.print(f"\n{outcome.part.name}: {outcome.status}; its last lines:", style="bold", markup=False)
            console.print(outcome.output[-TAIL:], markup=False, soft_wrap=True)
    if gate_red:
        console.print("GATE RED: op tests failed; figures below, if any, mean nothing", style="bold red")
    elif not any(outcome.part.name == "ops" and outcome.status == "ok" for outcome in runner.outcomes):
        console.print("the op tests have not been run to their end", style="bold")
    for table in summary(runner.outcomes, runner.results):
        console.print(table)
    for line in kernel_lines(runner.results):
        console.print(line, style="dim", markup=False, soft_wrap=True)
    sys.exit(any(outcome.status != "ok" for outcome in runner.outcomes))


if __name__ == "__main__":
    main()
