"""The bundled model through all four services, beside transformers and llama.cpp in the same run.

Rounds of the three alternate, and each figure is the median of its rounds, since other work on the machine disturbs
all of them alike. llama.cpp takes part if `--llama-python` names a Python that has llama-cpp-python.

    python -m benchmarks.bundled --json bundled.json --llama-python /path/to/venv/bin/python
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.load import stream_all
from benchmarks.report import Result, report
from benchmarks.system import System
from common.model_source import resolve

PROMPT, OUTPUT = 64, 64
FRESH = itertools.count()  # makes every prompt new, so that no prefix is found
Figures = dict[str, float]


def body(model: str, length: int, output: int) -> dict[str, Any]:
    number = next(FRESH)
    ids = [(i * 37 + number * 101) % 40_000 + 300 for i in range(length)]
    return {"model": model, "prompt": ids, "max_tokens": output, "ignore_eos": True, "temperature": 0}


def valence(system: System, model: str) -> Figures:
    """One round: tokens per second from the first token of all to the last, and prefill."""
    figures: Figures = {}
    for streams in (1, 4, 16):
        results = stream_all(system.port, "/v1/completions", [body(model, PROMPT, OUTPUT) for _ in range(streams)])
        decode_s = max(r.total_s for r in results) - min(r.first_s for r in results)
        figures[f"tokens_per_s_{streams}"] = sum(r.output_tokens - 1 for r in results) / decode_s
    for length in (512, 1024):
        (result,) = stream_all(system.port, "/v1/completions", [body(model, length, 1)])
        figures[f"prefill_tokens_per_s_{length}"] = length / result.first_s
    return figures


def peer(command: list[str]) -> Figures:
    """One round of a peer in its own process."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-python", default="", help="a Python that has llama-cpp-python")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="settings of the services")
    arguments = parser.parse_args()
    threads = str(os.cpu_count())
    peers = {"transformers": [sys.executable, "-m", "benchmarks.peer_transformers", threads]}
    if arguments.llama_python:
        script = str(Path(__file__).with_name("peer_llama.py"))
        peers["llama_cpp"] = [arguments.llama_python, script, str(resolve("bundled").path), threads]
    rounds: dict[str, list[Figures]] = defaultdict(list)
    starts = []
    for _ in track(range(arguments.rounds), "rounds"):
        with System(*arguments.set) as system:
            starts.append(system.ready_s)
            model = system.status()["model"]
            valence(system, model)  # the first requests find cold caches
            rounds["bundled"].append(valence(system, model))
        for name, command in peers.items():
            rounds[name].append(peer(command))
    conditions = (
        f"SmolLM2-135M-Instruct Q4_1, {threads} cores, median of {arguments.rounds} rounds, prompts of {PROMPT}"
    )
    results = [Result("bundled_ready_s", statistics.median(starts), "s", conditions)]
    for name, figures in rounds.items():
        for key in figures[0]:
            value = statistics.median(figure[key] for figure in figures)
            results.append(Result(f"{name}_{key}", value, "tokens/s", conditions))
    report(results, arguments.json)


if __name__ == "__main__":
    main()
