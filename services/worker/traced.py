"""The worker's part of traces: a span for each time that a traced row was in steps without a pause. Owned by its loop.

Without traced rows it is asked for each plan's additions and otherwise does nothing.
"""

from common.columns import unpack_i32
from common.protocol import StepPlan
from common.trace_context import Trace, read
from common.tracing import Span, Spans, Value, new_span_id

NOT_BEGUN = float("inf")


class TracedRow:
    __slots__ = ("end_s", "seq_id", "start_s", "steps", "tokens", "trace")

    def __init__(self, trace: Trace, seq_id: int) -> None:
        self.trace, self.seq_id = trace, seq_id
        self.rest()

    def rest(self) -> None:
        self.start_s, self.end_s = NOT_BEGUN, 0.0
        self.steps = self.tokens = 0


class TracedRows:
    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._rows: dict[int, TracedRow] = {}  # by slot

    def begin(self, plan: StepPlan, now_s: float) -> None:
        """Before the plan runs."""
        if self._rows:
            for slot in unpack_i32(plan.removed).tolist():
                self._tell(self._rows.pop(slot, None))
        for start in plan.added:
            if start.trace and (trace := read(start.trace)):
                self._rows[start.slot] = TracedRow(trace, start.seq_id)
        if self._rows:
            for slot, count in zip(unpack_i32(plan.slots).tolist(), unpack_i32(plan.counts).tolist(), strict=True):
                if row := self._rows.get(slot):
                    row.start_s = min(row.start_s, now_s)
                    row.steps += 1
                    row.tokens += count

    def end(self, now_s: float) -> None:
        """The oldest plan in flight has run; rows of newer ones go on."""
        for row in self._rows.values():
            row.end_s = now_s

    def rest(self) -> None:
        """Nothing is in flight, and nothing has come for a while: rows have ended, or wait for long."""
        for row in self._rows.values():
            self._tell(row)
            row.rest()

    def reset(self) -> None:
        """All rows are gone."""
        self.rest()
        self._rows.clear()

    def _tell(self, row: TracedRow | None) -> None:
        if row is None or not row.steps:
            return
        attributes: dict[str, Value] = {
            "gen_ai.request.id": f"{row.seq_id:#018x}",
            "valence.steps": row.steps,
            "valence.tokens": row.tokens,
        }
        end_s = max(row.end_s, row.start_s)
        self._spans.tell(Span("execute", row.trace, new_span_id(), row.start_s, end_s, attributes))
