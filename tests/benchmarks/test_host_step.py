"""What a decode step may cost the host: counted, not timed."""

from argparse import Namespace
from itertools import pairwise

import pytest
import torch

from benchmarks.host_step import WARM, device, make_engine, make_plans, measure, step
from benchmarks.models import find_model
from services.worker.model_engine import ModelEngine

STEPS = 20
GIVEN = Namespace(steps=STEPS, model="tiny", set=[], temperature=0.7, counted="", profile=False)
MOST_CALLS = 100  # of Python and C; the next kind of work that all steps shall pay for has to be worth it


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)


def calls(rows: int) -> float:
    found = {result.name: result.value for result in measure(rows, GIVEN)}
    return found[f"host_step_{rows}_python_calls"] + found[f"host_step_{rows}_c_calls"]


def test_a_step_that_decodes_costs_the_host_few_calls(one_thread: None) -> None:
    few, many = calls(1), calls(32)
    assert few < MOST_CALLS
    assert many - few < 2, "and no row costs a call of its own"


def test_every_step_is_replayed_with_its_own_inputs(one_thread: None) -> None:
    """What the stood-in device was given last is the newest step's: tokens one further on."""
    engine = make_engine(3, find_model("tiny"), [])
    seen = []
    with device():
        for plan in make_plans(engine, 3, WARM, 0.0):
            step(engine, plan)
            seen.append(newest(engine))
    decoding = [positions for rows, positions in seen if rows == 3][2:]
    assert len(decoding) > WARM - 4
    assert all([place + 1 for place in sooner] == later for sooner, later in pairwise(decoding))


def newest(engine: ModelEngine) -> tuple[int, list[int]]:
    """Rows of the pure decode layout, and the positions in it."""
    graphs = engine._runner._graphs
    assert graphs is not None
    inputs = graphs._captured[next(key for key in graphs.keys if key.decode >= 3 and not key.chunk)].inputs
    live = int((inputs.slots < 3).sum())
    return live, inputs.tokens[1, :live].tolist()
