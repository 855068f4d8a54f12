"""A minute of tests/chaos/soak.py, with the bundled model. So short a life says little of memory: what never dies is
judged, by a wide rule.
"""

from rich.console import Console

from benchmarks.chaos.soak import LOAD
from tests.chaos.soak import Plan, soak, table
from tests.chaos.test_kills import SETTINGS

PLAN = Plan(
    length_s=60.0,
    kill_every_s=12.0,
    streams=6,
    asks=8,
    longest=24,
    warm_s=20.0,
    least_s=30.0,
    tolerance_mib=24.0,
    pause_s=1.0,  # more requests a second prove no more
    settings=SETTINGS,
)


def test_a_minute_of_everything() -> None:
    console = Console()
    found = soak(PLAN, console)
    console.print(table(found))
    assert found.faults == []
    assert found.verdict.equal > 0
    assert found.run.watched > 5  # a scheduler that is busy may not answer at once
    assert sum(found.run.did.values()) > len(LOAD)
    assert {name.split(" ")[0] for name, _ in found.growths} >= {"api-0", "tokenizer-0"}
