"""A short run of tests/chaos/kills.py: each service once, two at once, and one while another is being replaced.

With a null worker; what a real one says after its deaths is judged the same way by test_soak.py, and by all of this in
`make test-long`.
"""

import pytest
from rich.console import Console

from benchmarks.recovery import Plan, measure, table
from tests.chaos.conftest import NULL

# What got no processor for some seconds is not dead: nobody but those that are killed may be replaced.
SETTINGS = ("worker.threads=1", "links.dead_after_s=30")


@pytest.mark.parametrize(
    "worker", [NULL, pytest.param((), marks=pytest.mark.long)], ids=["null worker", "bundled model"]
)
def test_kills_lose_and_repeat_nothing(worker: tuple[str, ...]) -> None:
    console = Console()
    found = measure(Plan(kills=8, streams=8, asks=8, longest=40, settings=(*SETTINGS, *worker)), console)
    console.print(table(found))
    verdict = found.verdict
    assert verdict.faults == []
    assert (verdict.lost, verdict.duplicated) == (0, 0)
    assert verdict.equal >= 8
    assert sum(len(blow.pids) for blow in found.blows) == 8
    assert {blow.kind for blow in found.blows} >= {"none", "api", "tokenizer", "scheduler", "worker", "two at once"}
    hit = [kind for kind in found.pauses if kind.kind in ("tokenizer", "scheduler", "worker")]
    assert len(hit) == 3 and all(kind.streams for kind in hit), "nobody was there to be disturbed"
