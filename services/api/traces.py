"""The API's part of a trace: takes the caller's context or begins a trace, and tells the request when it is answered.

Names are those of OpenTelemetry's GenAI conventions, and vLLM's where they differ. No text of prompts or answers.
"""

import random
from collections.abc import Iterable

from common.config import Traces
from common.trace_context import Trace, parse
from common.tracing import Span, Spans, Value, new_span_id, new_trace_id
from services.api.requests import Request

Headers = Iterable[tuple[bytes, bytes]]


class Tracer:
    def __init__(self, settings: Traces, spans: Spans) -> None:
        self._ratio, self._spans = settings.ratio, spans

    def begin(self, headers: Headers) -> "Begun | None":
        """None for a request that is not recorded: its caller says so, or chance."""
        given = {name: value.decode("latin-1") for name, value in headers if name in (b"traceparent", b"tracestate")}
        found = parse(given.get(b"traceparent", ""), given.get(b"tracestate", ""))
        if found is not None:
            return Begun(found[0]) if found[1] else None
        return Begun(Trace(new_trace_id(), "")) if random.random() < self._ratio else None

    def tell(self, begun: "Begun", request: Request | None, http: "Http") -> None:
        """The whole request, once its answer's last byte is sent. What generates nothing is told to callers only."""
        if request is None and not begun.caller.span_id:
            return
        attributes = http.attributes()
        name, error = f"{http.method} {http.route}", str(http.status) if http.status >= 500 else ""
        if request is not None:
            name = f"{begun.operation} {begun.model}"
            attributes |= {"gen_ai.operation.name": begun.operation, "gen_ai.provider.name": "valence"}
            attributes |= generation(request, begun.model, http.ended_s)
            if request.failure is not None:
                error = request.failure.reason
        if error:
            attributes["error.type"] = error
        span = Span(name, begun.caller, begun.span_id, http.started_s, http.ended_s, attributes, "server", error)
        self._spans.tell(span)


class Begun:
    """A request that is recorded. The endpoint sets `operation` and `model` when it knows them."""

    __slots__ = ("caller", "model", "operation", "span_id")

    def __init__(self, caller: Trace) -> None:
        self.caller = caller
        self.span_id = new_span_id()
        self.operation, self.model = "chat", ""

    @property
    def own(self) -> Trace:
        """What is done for the request is within our span."""
        return self.caller.within(self.span_id)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of the answer: where its trace is found."""
        own = self.own
        state = [(b"tracestate", own.state.encode("latin-1"))] if own.state else []
        return [(b"traceparent", own.traceparent.encode()), *state]


class Http:
    """How the request came and went; times of the monotonic clock."""

    __slots__ = ("ended_s", "method", "request_id", "route", "started_s", "status")

    def __init__(self, method: str, route: str, status: int, request_id: str, started_s: float, ended_s: float) -> None:
        self.method, self.route, self.status, self.request_id = method, route, status, request_id
        self.started_s, self.ended_s = started_s, ended_s

    def attributes(self) -> dict[str, Value]:
        return {
            "http.request.method": self.method,
            "http.route": self.route,
            "http.response.status_code": self.status,
            "gen_ai.request.id": self.request_id,
        }


def generation(request: Request, model: str, ended_s: float) -> dict[str, Value]:
    """What was asked and what came of it."""
    first = request.choices[0]
    sampling, finished = first.submit.sampling, [choice.finished for choice in request.choices]
    prompts = [choice.finished for choice in request.choices if choice.origin == choice.first]
    prompt_tokens = sum(each.prompt_tokens for each in prompts if each)
    output_tokens = sum(choice.received for choice in request.choices)
    found: dict[str, Value] = {
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": str(sampling.seed),  # 64 bits, which an integer of the protocol has not
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.choice.count": first.submit.n,
        "gen_ai.request.n": first.submit.n,
        "gen_ai.response.finish_reasons": [choice.word for choice in request.choices if choice.finished],
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": output_tokens,
        "gen_ai.usage.prompt_tokens": prompt_tokens,
        "gen_ai.usage.completion_tokens": output_tokens,
        "gen_ai.usage.cache_read.input_tokens": sum(each.cached_tokens for each in finished if each),
        "gen_ai.usage.num_sequences": len(request.choices),
        "gen_ai.latency.e2e": ended_s - request.opened_s,
    }
    if begun := [choice.begun_s for choice in request.choices if choice.begun_s]:
        found["gen_ai.latency.time_to_first_token"] = min(begun) - request.opened_s
    return found
