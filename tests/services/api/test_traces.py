import pytest

from common.config import Traces
from common.errors import Reject, RejectReason
from common.protocol import FinishReason, PromptKind, Sampling, Submit, TextFinished
from common.trace_context import Trace
from common.tracing import Span
from services.api.figures import Figures
from services.api.hub import Hub
from services.api.requests import Request
from services.api.routes import Routes
from services.api.traces import Begun, Http, Tracer
from tests.services.api.system import rows
from tests.services.api.test_hub import A

CALLER = Trace("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "a=1")
SAMPLED = [(b"traceparent", CALLER.traceparent.encode()), (b"tracestate", b"a=1")]


class Told:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def tell(self, span: Span) -> None:
        self.spans.append(span)


def tracer(ratio: float = 1.0) -> tuple[Tracer, list[Span]]:
    told = Told()
    return Tracer(Traces(ratio=ratio), told), told.spans  # type: ignore[arg-type]


def answered() -> Request:
    hub = Hub(Routes(0, 1), 10, lambda peer, message: True, Figures(), 30.0)
    request = hub.open([Submit(0, PromptKind.TEXT, Sampling(16, 7, temperature=0.5), text="x", n=2)], [A], 1.0, 0)
    first, second = request.choices
    hub.feed(rows((first.seq_id, 0, 1, "a"), (second.seq_id, 0, 2, "bc")), 1.5)
    ends = [
        TextFinished(first.seq_id, FinishReason.EOS, 5, 1, 4),
        TextFinished(second.seq_id, FinishReason.LENGTH, 5, 2),
    ]
    hub.feed(rows(finished=tuple(ends)), 3.0)
    return request


def http(status: int = 200) -> Http:
    return Http("POST", "/v1/completions", status, "r1", 1.0, 3.5)


def test_the_caller_decides_else_chance() -> None:
    always, never = tracer(1.0)[0], tracer(0.0)[0]
    begun = never.begin(SAMPLED)
    assert begun and begun.caller == CALLER and begun.own == CALLER.within(begun.span_id)
    assert dict(begun.headers()) == {b"traceparent": begun.own.traceparent.encode(), b"tracestate": b"a=1"}
    unsampled = CALLER.traceparent[:-1] + "0"
    assert always.begin([(b"traceparent", unsampled.encode())]) is None
    assert never.begin([]) is None and never.begin([(b"traceparent", b"\xff")]) is None
    one, other = always.begin([]), always.begin([])
    assert one and other and one.caller.trace_id != other.caller.trace_id and not one.caller.span_id
    assert [name for name, _ in one.headers()] == [b"traceparent"]


def test_a_generation_is_told_by_the_names_of_the_field() -> None:
    spent, spans = tracer()
    begun = spent.begin(SAMPLED)
    assert begun
    begun.operation, begun.model = "text_completion", "tiny"
    spent.tell(begun, answered(), http())
    (span,) = spans
    assert (span.name, span.kind, span.error) == ("text_completion tiny", "server", "")
    assert (span.trace, span.span_id, span.start_s, span.end_s) == (CALLER, begun.span_id, 1.0, 3.5)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.id": "r1",
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["stop", "length"],
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.latency.e2e": 2.5,
        "gen_ai.latency.time_to_first_token": 0.5,
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
    }
    assert {name: span.attributes.get(name) for name in expected} == expected


def test_a_failure_says_why() -> None:
    spent, spans = tracer()
    request = answered()
    request.failure = Reject(RejectReason.OVERLOADED, "try again")
    spent.tell(Begun(CALLER), request, http(429))
    assert (spans[0].error, spans[0].attributes["error.type"]) == ("overloaded", "overloaded")


@pytest.mark.parametrize(("caller", "count"), [(CALLER, 1), (CALLER._replace(span_id=""), 0)])
def test_what_generates_nothing_is_told_to_callers_only(caller: Trace, count: int) -> None:
    spent, spans = tracer()
    spent.tell(Begun(caller), None, http(500))
    assert [(span.name, span.error) for span in spans] == [("POST /v1/completions", "500")] * count
