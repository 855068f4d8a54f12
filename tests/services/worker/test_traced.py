from typing import Any

from common.columns import pack_i32
from common.protocol import RowStart, Sampling, StepPlan
from common.trace_context import Trace
from common.tracing import Span
from services.worker.traced import TracedRows

TRACE = Trace("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


class Told:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def tell(self, span: Span) -> None:
        self.spans.append(span)


def start(slot: int, trace: str = TRACE.text) -> RowStart:
    return RowStart(slot, 70 + slot, b"", 3, 0, b"", Sampling(4), trace=trace)


def plan(step: int, slots: list[int], counts: list[int], **more: Any) -> StepPlan:
    return StepPlan(step, slots=pack_i32(slots), counts=pack_i32(counts), **more)


def rows() -> tuple[TracedRows, list[Span]]:
    told = Told()
    return TracedRows(told), told.spans  # type: ignore[arg-type]


def test_a_row_is_told_from_its_first_step_to_its_last() -> None:
    traced, spans = rows()
    traced.begin(plan(1, [2, 3], [5, 1], added=[start(2), start(3, "")]), 10.0)
    traced.end(11.0)
    traced.begin(plan(2, [3, 2], [1, 1]), 11.0)
    traced.end(13.0)
    assert not spans
    traced.begin(plan(3, [3], [1], removed=pack_i32([2])), 20.0)
    (span,) = spans
    assert (span.name, span.trace, span.start_s, span.end_s) == ("execute", TRACE, 10.0, 13.0)
    assert span.attributes["valence.steps"] == 2 and span.attributes["valence.tokens"] == 6
    assert span.attributes["gen_ai.request.id"] == f"{72:#018x}"


def test_a_rest_tells_once_and_what_follows_is_another_span() -> None:
    traced, spans = rows()
    traced.begin(plan(1, [2], [5], added=[start(2)]), 10.0)
    traced.end(11.0)
    traced.rest()
    traced.rest()
    assert len(spans) == 1
    traced.begin(plan(2, [2], [1]), 30.0)
    traced.end(31.0)
    traced.reset()
    traced.begin(plan(1, [2], [1]), 40.0)  # of another scheduler: the slot's row is not traced
    traced.reset()
    assert [(span.start_s, span.end_s) for span in spans] == [(10.0, 11.0), (30.0, 31.0)]


def test_nonsense_is_not_traced() -> None:
    traced, spans = rows()
    traced.begin(plan(1, [2], [5], added=[start(2, "nonsense")]), 10.0)
    traced.reset()
    assert not spans
