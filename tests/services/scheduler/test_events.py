"""Events and effects are frozen values; wire messages are events as they are."""

from typing import get_args

import msgspec
import pytest

from common.protocol import ToScheduler
from services.scheduler.events import Effect, Event, SendPlan, WorkerLost


def test_values_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        WorkerLost().reason = "x"  # type: ignore[misc]


def test_effects_can_be_encoded_for_traces() -> None:
    for kind in get_args(Effect):
        assert issubclass(kind, msgspec.Struct)
    assert "plan" in SendPlan.__struct_fields__


def test_requests_and_results_are_events_as_they_arrive() -> None:
    shared = set(get_args(Event)) & set(get_args(ToScheduler))
    assert {kind.__name__ for kind in shared} == {"Admit", "Stop", "Abort", "Pause", "StepResult", "WorkerReady"}
