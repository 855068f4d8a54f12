"""A rank of two dies under streams with a draft model (the model itself): the text is that without drafts.

Part of `make test-long`: all of it together. test_ranks.py proves the death of a rank, test_draft_ranks.py
the drafts of ranks, test_speculative.py drafts behind a death.
"""

import asyncio

import pytest

from benchmarks.system import System
from tests.e2e.steered import Steered
from tests.e2e.test_ranks import second_rank
from tests.e2e.test_recovery import run, struck
from tests.e2e.test_speculative import ASKED, SETTINGS, TEXT, accepted
from tests.e2e.test_workers import same, until, until_nothing_is_held

pytestmark = pytest.mark.long


def test_the_same_text_by_a_draft_model_when_one_of_two_ranks_dies(bundled: System) -> None:
    settings = (
        *("speculative.method=draft", "speculative.model=bundled", "speculative.tokens=2"),
        *("worker.tensor_parallel=2", "scheduler.step_deadline_s=30"),
    )
    asked = [(path, body | {"prompt": TEXT[:66], "max_tokens": 16}) for path, body in ASKED[:1]]
    calm = asyncio.run(run(bundled, asked))
    with Steered(*SETTINGS, *settings, start_s=250.0) as divided:
        same(calm, struck(divided, asked, [lambda: second_rank(divided).kill()], steps=3))
        until(lambda: accepted(divided) > 4)
        until_nothing_is_held(divided)
