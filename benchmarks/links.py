"""What keys cost on a tcp link: processor time of both ends per message, and the time of one message, by turns.

python -m benchmarks.links --json links.json
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.report import Result, report
from common.config import Links
from common.protocol import StepResult, ToScheduler
from common.transport import Inbox, LinkCounters, Push, secure
from valence import link_keys

ROUNDS = 1000
AHEAD = 1000  # messages under way


def measure(links: Links, size: int, count: int) -> tuple[float, float]:
    """Microseconds of processor time per message, and from a send to its arrival."""
    secure(links)
    inbox: Inbox[StepResult] = Inbox("tcp://127.0.0.1:0", ToScheduler, 2 * AHEAD, LinkCounters())
    push = Push(inbox.endpoint, 1, 2 * AHEAD, LinkCounters())
    message = StepResult(1, bytes(size))
    push.send(message)
    inbox.wait(10)
    inbox.drain()
    start_s, sent, received = time.process_time(), 0, 0
    while received < count:
        while sent < count and sent - received < AHEAD:
            sent += push.send(message)
        inbox.wait(1)
        received += len(inbox.drain())
    used_us = (time.process_time() - start_s) / count * 1e6
    times: list[float] = []
    for _ in range(ROUNDS):
        round_s = time.perf_counter()
        push.send(message)
        inbox.wait(10)
        inbox.drain()
        times.append(time.perf_counter() - round_s)
    push.close()
    inbox.close()
    return used_us, statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        link_keys.init(Path(folder) / "keys", "here")
        kinds = {"plain": Links(), "keys": Links(transport="tcp", keys_dir=f"{folder}/keys")}
        for size in (64, 2048, 65_536):
            count = 20_000 if size < 10_000 else 3_000
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
            for _ in range(arguments.runs):
                for name, links in kinds.items():
                    found[name].append(measure(links, size, count))
            conditions = f"tcp loopback, both ends in one process, median of {arguments.runs} alternating runs"
            for name, runs in found.items():
                used, taken = (statistics.median(run[part] for run in runs) for part in (0, 1))
                results.append(Result(f"link_cpu_us_{size}_{name}", used, "us", conditions))
                results.append(Result(f"link_round_us_{size}_{name}", taken, "us", conditions))
    report(results, arguments.json)


if __name__ == "__main__":
    main()
