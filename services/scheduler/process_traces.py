"""The scheduler's part of traces: a span for each sequence, with its time in the queue, prefill and decode below it.

Called by the shell for sequences that have ended; all of it is told afterwards, from the times that the core keeps.
"""

from collections.abc import Iterable
from math import inf

from common.trace_context import read
from common.tracing import Event, Span, Spans, Value, new_span_id
from services.scheduler.past import Traced


def tell(spans: Spans, ended: Iterable[Traced]) -> None:
    for each in ended:
        for span in spans_of(each):
            spans.tell(span)


def spans_of(traced: Traced) -> list[Span]:
    sequence, end_s = traced.sequence, traced.ended_s
    trace = read(sequence.trace)
    if trace is None:
        return []
    attributes: dict[str, Value] = {
        "gen_ai.request.id": f"{sequence.seq_id:#018x}",
        "gen_ai.usage.prompt_tokens": sequence.request.num_prompt,
        "gen_ai.usage.completion_tokens": sequence.num_output,
        "gen_ai.response.finish_reasons": [traced.finished.reason.name.lower()],
        "valence.cached_tokens": max(sequence.cached_tokens, 0),
        "valence.preemptions": sequence.preemptions,
        "valence.worker_deaths": sequence.worker_deaths,
    }
    started_s, first_s = min(sequence.started_s, end_s), min(sequence.first_s, end_s)
    parts = [("queue", sequence.admitted_s, started_s)]
    if sequence.started_s < inf:
        parts.append(("prefill", started_s, first_s))
    if sequence.first_s < inf:
        parts.append(("decode", first_s, end_s))
        attributes["gen_ai.latency.time_in_model_prefill"] = first_s - started_s
        attributes["gen_ai.latency.time_in_model_decode"] = end_s - first_s
        attributes["gen_ai.latency.time_in_model_inference"] = end_s - started_s
    attributes["gen_ai.latency.time_in_queue"] = started_s - sequence.admitted_s
    events = [Event(at_s, text) for at_s, text in sequence.log]
    error = traced.finished.message
    own = Span(
        "llm_request", trace, sequence.span_id, sequence.admitted_s, end_s, attributes, "internal", error, events
    )
    within = trace.within(sequence.span_id)
    return [own, *(Span(name, within, new_span_id(), begin_s, until_s, {}) for name, begin_s, until_s in parts)]
