"""The search of a request through the Streams, whose scheduler the test plays."""

from array import array
from typing import Any

import msgspec
import pytest

from common.columns import pack_i32, pack_u64
from common.errors import Reject
from common.logprobs import Report, TokenLogprobs, record_bytes
from common.protocol import Abort, Admit, Finished, FinishReason, Options, Sampling, TokenBatch
from common.text_format import Beams
from services.api.logprobs import Reported
from services.tokenizer.encode import Prompt
from tests.services.tokenizer.test_streams import EOS, FIRST, MODEL, Bench

LIKELY = {"": "ab", "a": "cd", "b": "de", "ac": "xy", "ad": "xy", "bd": "xy", "be": "xy"}  # what follows, best first


@pytest.fixture
def bench() -> Bench:
    return Bench()


def record(tokens: str, top: int) -> bytes:
    ids = [*map(ord, tokens), *range(1, top + 1)][:top]
    values = [-0.5 * place - 0.5 for place in range(len(tokens))] + [-30.0] * (top - len(tokens))
    return array("i", [1, ids[0], *ids]).tobytes() + array("f", [values[0], *values]).tobytes()


def answer(bench: Bench, admit: Admit, cached: int = 0) -> None:
    """As a scheduler with a model of LIKELY does."""
    assert admit.sampling.max_tokens == 1 and admit.sampling.temperature == 0 and not admit.output
    said = "".join(map(chr, memoryview(admit.tokens).cast("i")))[2:]
    likely, top = LIKELY[said], admit.sampling.report.top
    columns = pack_u64([admit.seq_id]), pack_i32([0]), pack_i32([ord(likely[0])])
    told = {admit.seq_id: TokenLogprobs(0, record(likely, top))}
    end = Finished(admit.seq_id, FinishReason.LENGTH)
    bench.streams.take(TokenBatch(*columns, [end], logprobs=told, cached={admit.seq_id: cached}), 0)


def begin(bench: Bench, **sampling: Any) -> list[Admit]:
    bench.admit(n=2, options=Options(beams=Beams(2)), sampling=Sampling(3, **sampling), priority=4)
    return taken(bench)


def taken(bench: Bench) -> list[Admit]:
    admits = [message for message in bench.to_scheduler if isinstance(message, Admit)]
    bench.to_scheduler.clear()
    return admits


def test_a_search(bench: Bench) -> None:
    (first,) = begin(bench, report=Report(1))
    assert (first.n, first.again, first.priority, first.sampling.report.top) == (1, False, 4, 4)
    answer(bench, first, cached=1)
    steps = taken(bench)
    assert [(step.seq_id - FIRST, step.again, step.priority) for step in steps] == [(0, True, 3), (1, True, 3)]
    assert [step.tokens for step in steps] == [pack_i32(list(b"hia")), pack_i32(list(b"hib"))]
    answer(bench, steps[1])
    assert not taken(bench), "the other beam is not back"
    answer(bench, steps[0])
    for step in taken(bench):
        answer(bench, step)
    rows, ends = bench.flush()
    assert sorted((seq_id - FIRST, text) for seq_id, _, _, text in rows) == [(0, "acx"), (1, "acy")]
    assert [(end.reason, end.output_tokens, end.cached_tokens) for end in ends] == [(FinishReason.LENGTH, 3, 1)] * 2
    told = Reported(Report(1))
    assert told.add(bench.to_api[-1].logprobs[FIRST + 1])
    assert [(chr(each.own.token), each.rank, chr(each.best[0].token)) for each in told.output] == [
        ("a", 1, "a"),
        ("c", 1, "c"),
        ("y", 2, "x"),
    ]
    assert not bench.streams.open_requests and not bench.streams.lanes.lane(0).sequences


def test_a_new_scheduler_gets_the_steps_that_are_not_back(bench: Bench) -> None:
    answer(bench, begin(bench)[0])
    first, second = taken(bench)
    answer(bench, first)
    bench.streams.lanes.renewed(0)
    assert taken(bench) == [second], "and nothing of the beam that waits"
    answer(bench, second)
    assert len(taken(bench)) == 2


def test_an_end_of_a_beam_ends_no_other(bench: Bench) -> None:
    LIKELY["a"] = f"{chr(EOS)}d"
    try:
        answer(bench, begin(bench)[0])
        for step in taken(bench):
            answer(bench, step)
        for step in taken(bench):
            answer(bench, step)
    finally:
        LIKELY["a"] = "cd"
    ends = {end.seq_id - FIRST: end.reason for end in bench.flush()[1]}
    assert ends == {0: FinishReason.EOS, 1: FinishReason.LENGTH}


def test_an_error_and_an_abort_end_their_choice(bench: Bench) -> None:
    (first,) = begin(bench)
    bench.take(finished=[Finished(first.seq_id, FinishReason.ERROR, message="out of memory", code="out_of_memory")])
    (end,) = bench.flush()[1]
    assert (end.reason, end.message, end.code) == (FinishReason.ERROR, "out of memory", "out_of_memory")
    bench.streams.abort(FIRST + 1)
    assert not bench.streams.open_requests


def test_nothing_is_computed_for_a_search_that_was_given_up(bench: Bench) -> None:
    answer(bench, begin(bench)[0])
    first, second = taken(bench)
    answer(bench, first)
    bench.streams.abort(FIRST)
    answer(bench, second)
    assert not taken(bench)
    bench.streams.abort(FIRST + 1)
    assert not bench.streams.open_requests and not any(isinstance(each, Admit) for each in bench.to_scheduler)


def test_records_have_the_width_of_what_was_asked_for(bench: Bench) -> None:
    (first,) = begin(bench, report=Report(7))
    assert first.sampling.report.top == 7 and len(record("ab", 7)) == record_bytes(7)
    bench.streams.abort(FIRST)
    assert bench.to_scheduler == [Abort(FIRST)]


def test_more_ends_than_a_search_can_look_beyond_are_refused(bench: Bench) -> None:
    model = msgspec.structs.replace(MODEL, vocab_size=100_000)
    sampling = Sampling(3, stop_token_ids=tuple(range(600)))
    request = bench.open(n=2, options=Options(beams=Beams(2)), sampling=sampling)
    with pytest.raises(Reject, match="more than a search can take"):
        bench.streams.admit(request, Prompt(array("i", list(b"hi"))), model)


def test_there_are_as_many_beams_as_choices_whoever_says_otherwise(bench: Bench) -> None:
    bench.admit(n=2, options=Options(beams=Beams(9)), sampling=Sampling(3))
    assert taken(bench)[0].sampling.report.top == 4
