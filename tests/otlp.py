"""A collector of traces: OTLP over HTTP, as OpenTelemetry's own exporter sends it."""

import http.server
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Received(NamedTuple):
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[str]
    error: bool
    kind: int
    state: str


def plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def read(body: bytes) -> list[Received]:
    found = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        own = {each.key: plain(each.value) for each in resource.resource.attributes}
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
            times = span.start_time_unix_nano, span.end_time_unix_nano
            attributes = {each.key: plain(each.value) for each in span.attributes}
            events, error = [each.name for each in span.events], span.status.code == 2
            more = attributes, events, error, span.kind, span.trace_state
            found.append(Received(own["service.name"], span.name, *ids, *times, *more))
    return found


class Collector:
    def __init__(self) -> None:
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with collector.changed:
                    collector.spans += read(body)
                    collector.changed.notify_all()
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.spans: list[Received] = []
        self.changed = threading.Condition()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def until(self, condition: Callable[[list[Received]], bool], limit_s: float = 60.0) -> list[Received]:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.spans), limit_s), self.spans
            return list(self.spans)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
