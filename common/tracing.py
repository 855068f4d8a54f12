"""Spans of one process, sent to an OpenTelemetry collector by the official SDK. Only with `traces.endpoint`.

What was done is told when it is over, with its times, so no span is open anywhere and nothing runs before or between.
The SDK's batch processor takes spans without waiting and drops them when its queue is full; a thread of its own sends.
Owned by the process; the SDK is imported here and only then.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from common.config import Traces
from common.errors import ConfigError
from common.trace_context import Trace

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

log = logging.getLogger("traces")
Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["server", "internal"]
EXPORT_S = 5.0
CLOSE_S = 3.0
SEND_EVERY_MS = 1000
QUEUED = 4096  # spans; more are dropped


class Event(NamedTuple):
    at_s: float
    text: str


class Span(NamedTuple):
    """Times are of the monotonic clock. `trace.span_id` is the parent, empty for a span that begins the trace."""

    name: str
    trace: Trace
    span_id: str
    start_s: float
    end_s: float
    attributes: Attributes
    kind: Kind = "internal"
    error: str = ""
    events: Sequence[Event] = ()


def new_span_id() -> str:
    return os.urandom(8).hex()


def new_trace_id() -> str:
    return os.urandom(16).hex()


class Spans:
    """Raises ConfigError if the SDK is not installed."""

    def __init__(self, settings: Traces, service: str, instance: int) -> None:
        try:
            from opentelemetry import trace as api
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk import trace as sdk
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise ConfigError(
                f"traces.endpoint needs OpenTelemetry's SDK ({error}): pip install 'valence[traces]'"
            ) from error
        self._api, self._sdk = api, sdk
        self._kinds = {"server": api.SpanKind.SERVER, "internal": api.SpanKind.INTERNAL}
        name = f"valence-{service}"
        self._resource = Resource.create({"service.name": name, "service.instance.id": f"{service}-{instance}"})
        self._scope = InstrumentationScope("valence")
        exporter = OTLPSpanExporter(settings.endpoint, timeout=EXPORT_S)
        self._processor = BatchSpanProcessor(exporter, max_queue_size=QUEUED, schedule_delay_millis=SEND_EVERY_MS)

    def tell(self, span: Span) -> None:
        """Waits for nothing."""
        ahead_s = time.time() - time.monotonic()

        def unix_ns(at_s: float) -> int:
            return int((at_s + ahead_s) * 1e9)

        status = self._api.Status(self._api.StatusCode.ERROR, span.error) if span.error else self._api.Status()
        parent = self._context(span.trace, span.trace.span_id) if span.trace.span_id else None
        self._processor.on_end(
            self._sdk.ReadableSpan(
                span.name,
                self._context(span.trace, span.span_id),
                parent,
                self._resource,
                dict(span.attributes),
                [self._sdk.Event(each.text, timestamp=unix_ns(each.at_s)) for each in span.events],
                kind=self._kinds[span.kind],
                status=status,
                start_time=unix_ns(span.start_s),
                end_time=unix_ns(span.end_s),
                instrumentation_scope=self._scope,
            )
        )

    def _context(self, trace: Trace, span_id: str) -> "SpanContext":
        state = self._api.TraceState.from_header([trace.state]) if trace.state else None
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        return self._api.SpanContext(int(trace.trace_id, 16), int(span_id, 16), True, flags, state)

    def close(self) -> None:
        """Sends what waits, for a few seconds at most: the SDK would try each batch for as long."""
        sending = threading.Thread(target=self._processor.shutdown, name="traces-end", daemon=True)
        sending.start()
        sending.join(CLOSE_S)


def open_spans(settings: Traces, service: str, instance: int) -> Spans | None:
    """None if traces are off. Raises ConfigError."""
    return Spans(settings, service, instance) if settings.endpoint else None
