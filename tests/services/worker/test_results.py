from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.host_step import Nothing
from services.worker.kernels.registry import Facts, bind
from services.worker.reports import Reporter
from services.worker.results import Results
from services.worker.staging import RING


def make_results(width: int) -> Results:
    return Results(width, torch.device("cpu"), Reporter(bind(("torch",), Facts("cpu"))))


def test_tokens_come_in_the_plans_order() -> None:
    results = make_results(6)
    results.lines[results.next_turn()] = torch.tensor([10, 11, 12, 13, 14, 15])
    assert results.taken(np.array([3, 0, 1])).tokens() == np.array([13, 10, 11], np.int32).tobytes()


def test_rows_with_drafts_have_the_tokens_that_hold() -> None:
    results = make_results(10)
    results.lines[results.next_turn()] = torch.tensor([10, 11, 12, 13, 14, 1, 1, 0, 1, 0])
    step = results.taken(np.arange(5), np.array([3, 2]))
    assert step.tokens() == np.array([10, 11, 13], np.int32).tobytes()
    assert step.counts() == (bytes([2, 1]), bytes([2, 1]))


def test_on_a_cpu_a_turn_that_comes_again_changes_nothing_taken() -> None:
    results, taken = make_results(1), []
    for step in range(RING + 3):
        results.lines[results.next_turn()] = step
        taken.append(results.taken(np.zeros(1, np.int64)))
    assert b"".join(step.tokens() for step in taken) == np.arange(RING + 3, dtype=np.int32).tobytes()


def test_a_turn_comes_again_when_its_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's lines, and what is staged by these turns, are those of a step that nothing runs any more."""
    waited: list[Nothing] = []
    monkeypatch.setattr(Nothing, "synchronize", lambda event: waited.append(event))
    results: Any = make_results(1)
    results._stream, results._events = Nothing(), [Nothing() for _ in range(RING)]
    begun = []
    for _ in range(2 * RING):
        begun.append(results._events[results.next_turn()])
        assert waited[-1] is begun[-1]
        results.taken(np.zeros(1, np.int64))
    assert begun[:RING] == begun[RING:] and len(set(begun)) == RING
