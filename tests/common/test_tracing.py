import sys
import threading
import time
from collections.abc import Iterator

import pytest

from common import tracing
from common.config import Traces
from common.errors import ConfigError
from common.trace_context import Trace
from common.tracing import Event, Span, Spans, new_span_id, new_trace_id, open_spans
from tests.otlp import Collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def test_spans_arrive_as_they_were_told(collector: Collector) -> None:
    spans = open_spans(Traces(endpoint=collector.endpoint), "api", 3)
    assert spans
    root = Trace(new_trace_id(), "", "vendor=1")
    now_s, before_ns = time.monotonic(), time.time_ns()
    first = Span("first", root, new_span_id(), now_s - 2.0, now_s, {"a": 1, "b": ["x", "y"]}, "server")
    inner = root.within(first.span_id)
    events = [Event(now_s - 0.5, "half")]
    spans.tell(first)
    spans.tell(Span("second", inner, new_span_id(), now_s - 1.0, now_s, {}, "internal", "it failed", events))
    spans.close()
    found = {span.name: span for span in collector.spans}
    one, two = found["first"], found["second"]
    assert (one.service, one.trace_id, one.span_id, one.parent_id) == ("valence-api", root.trace_id, first.span_id, "")
    assert two.trace_id == root.trace_id and two.parent_id == first.span_id
    assert (one.attributes, one.kind, one.error, one.state) == ({"a": 1, "b": ["x", "y"]}, 2, False, "vendor=1")
    assert (two.events, two.error, two.kind) == (["half"], True, 1)
    assert abs(one.end_ns - one.start_ns - 2e9) < 1e6 and abs(one.end_ns - before_ns) < 60e9


def test_a_collector_that_is_not_there_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_S", 0.1)  # else it tries on, and takes random numbers, in other tests' time
    gone = Collector()
    gone.close()
    spans = Spans(Traces(endpoint=gone.endpoint), "api", 0)
    trace = Trace(new_trace_id(), "")
    for number in range(20_000):  # more than its queue takes
        spans.tell(Span(f"{number}", trace, new_span_id(), 0.0, 1.0, {}))
    assert len(spans._processor._batch_processor._queue) <= 4096
    spans.close()
    assert "traces-end" not in {thread.name for thread in threading.enumerate()}


def test_off_means_that_nothing_is_imported() -> None:
    assert open_spans(Traces(), "api", 0) is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"traces\.endpoint needs .*pip install 'valence\[traces\]'"):
        open_spans(Traces(endpoint="http://127.0.0.1:1"), "api", 0)
