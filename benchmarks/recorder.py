"""What the flight recorder costs: one event, into memory and into its mapped file; opening the file; reading it.

python -m benchmarks.recorder --json recorder.json
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Result, report
from common import recorder
from common.protocol import Peer
from common.recorder import Kind, Recorder

CALLS = 2000


def per_call_us(call: Callable[[], object], calls: int, rounds: int) -> float:
    """Mean processor time of a call, the loop included, in the fastest round: others share the cores."""
    times = []
    for _ in range(rounds):
        start_s = time.process_time()
        for _ in range(calls):
            call()
        times.append((time.process_time() - start_s) / calls)
    return min(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="valence-") as folder:
        start_s = time.perf_counter()
        mapped = recorder.open_file(Path(folder), Peer("worker", 0, 1, "", os.getpid(), time.time()), "")
        opened_ms = (time.perf_counter() - start_s) * 1e3
        for name, own in (("memory", Recorder()), ("file", mapped)):

            def step(own: Recorder = own) -> None:
                own.steps.add(Kind.STEP, 0, 12345, 5000, 256)

            def request(own: Recorder = own) -> None:
                own.requests.add(Kind.RECEIVED, 1 << 60, 1, 50, text=b"chatcmpl-0123456789abcdef")

            for what, call in (("step", step), ("request", request)):
                value = per_call_us(call, CALLS, arguments.rounds)
                conditions = f"processor time, fastest of {arguments.rounds} rounds of {CALLS:,}, within a function"
                results.append(Result(f"recorder_{what}_{name}_us", value, "us", conditions))
        bare = per_call_us(lambda: None, CALLS, arguments.rounds)
        results.append(Result("recorder_function_us", bare, "us", "a function alone, for comparison"))
        beat = per_call_us(lambda: mapped.beat("ready", 0, 0, 0.5), CALLS, arguments.rounds)
        results.append(Result("recorder_beat_us", beat, "us", "nothing changed"))
        conditions = f"wall time; {recorder.FILE_BYTES:,} bytes allocated and mapped"
        results.append(Result("recorder_open_ms", opened_ms, "ms", conditions))
        path = next((Path(folder) / recorder.FOLDER).iterdir())
        read_us = per_call_us(lambda: recorder.read(path), 1, 10)
        results.append(Result("recorder_read_ms", read_us / 1e3, "ms", "two rings full"))
    report(results, arguments.json)


if __name__ == "__main__":
    main()
