"""One running system for the tests of its environment: two API and two tokenizer replicas, and a null worker.

Whether the model's own tokens survive is proved by test_soak.py, and by test_kills.py in `make test-long`.
"""

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.chaos.asks import asks
from benchmarks.chaos.kills import SETTINGS, Run
from benchmarks.chaos.site import Site, Topology
from benchmarks.system import System

STREAMS = 4
NULL = ("worker.kind=null", "worker.step_us=40000")
# Who gets no processor for some seconds is not dead, nor stuck, nor slow to send what nobody has read.
PATIENT = ("links.dead_after_s=8", "scheduler.step_deadline_s=60", "api.max_header_s=60")
LONGEST = ("test_kills.py", "test_soak.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First, so that all else is tested beside them."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="module")
def learnt() -> Iterator[Run]:
    """A run that knows the answers, on a system of this test file's own."""
    topology = Topology()
    with System(*SETTINGS, *topology.settings(), *NULL, *PATIENT) as system, Site(system, topology) as site:
        run = Run(site, asks(STREAMS, longest=24), STREAMS, seed=3)
        asyncio.run(run.learn())
        yield run


@pytest.fixture
def run(learnt: Run) -> Run:
    """The same with nothing in its books."""
    learnt.outcomes.clear()
    learnt.blows.clear()
    return learnt
