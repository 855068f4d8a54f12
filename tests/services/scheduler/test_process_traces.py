import msgspec

from common.protocol import Abort
from common.trace_context import Trace, read
from common.tracing import Span
from services.scheduler.process_traces import spans_of
from tests.services.scheduler.harness import Harness, ids

TRACE = Trace("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "a=1")


def admitted(harness: Harness, n: int = 1) -> int:
    message = msgspec.structs.replace(harness.message(ids(6), n=n, max_tokens=3), trace=TRACE.text)
    harness.send(message)
    return message.seq_id


def told(harness: Harness) -> dict[str, Span]:
    (traced,) = harness.core.state.past.traced
    return {span.name: span for span in spans_of(traced)}


def test_queue_prefill_and_decode_are_within_the_sequences_span() -> None:
    harness = Harness()
    admitted(harness)
    harness.ready()
    (start,) = harness.plans[0].added
    harness.run()
    spans = told(harness)
    whole = spans["llm_request"]
    assert whole.trace == TRACE and read(start.trace) == TRACE.within(whole.span_id)  # the worker's parent
    assert [spans[name].trace for name in ("queue", "prefill", "decode")] == [TRACE.within(whole.span_id)] * 3
    times = [(spans[name].start_s, spans[name].end_s) for name in ("queue", "prefill", "decode")]
    assert times == [(1.0, 2.0), (2.0, 3.0), (3.0, 5.0)] and (whole.start_s, whole.end_s) == (1.0, 5.0)
    found = whole.attributes
    assert found["gen_ai.latency.time_in_queue"] == 1.0 and found["gen_ai.latency.time_in_model_inference"] == 3.0
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (6, 3)
    assert not whole.error and whole.events[0].text.startswith("admitted")


def test_what_never_ran_was_in_the_queue_only() -> None:
    harness = Harness()
    harness.send(Abort(admitted(harness)))
    spans = told(harness)
    assert spans.keys() == {"llm_request", "queue"} and spans["queue"].end_s == 2.0
    assert spans["llm_request"].attributes["gen_ai.response.finish_reasons"] == ["abort"]


def test_each_choice_has_a_span_and_what_is_not_recorded_has_none() -> None:
    harness = Harness.with_worker()
    admitted(harness, n=2)
    harness.admit(ids(5))
    harness.run()
    traced = harness.core.state.past.traced
    assert len({spans_of(each)[0].span_id for each in traced}) == len(traced) == 2
