"""The judges of chaos runs can find what they look for."""

import random

import pytest

from benchmarks.chaos.asks import asks, with_stops
from benchmarks.chaos.client import Outcome, take
from benchmarks.chaos.judge import Answer, Blow, judge, pauses
from benchmarks.chaos.kills import schedule
from benchmarks.chaos.memory import growth
from benchmarks.chaos.site import Topology
from valence.programs import Program

ANSWERS = {0: Answer({0: "one two"}, {0: "length"}, 3, 4)}
API, WORKER = Program("api", 0), Program("worker", 0)


def outcome(**fields: object) -> Outcome:
    whole = {"end": "ended", "owner": 11, "status": 200, "texts": {0: "one two"}, "reasons": {0: "length"}}
    whole |= {"prompt_tokens": 3, "completion_tokens": 4, "ended_s": 9.0}
    return Outcome(0, 1.0, **(whole | fields))


def api_blow() -> Blow:
    return Blow((API,), recovering=False, at_s=5.0, ready_s=7.0, pids=[12])


def test_an_equal_answer_is_no_fault() -> None:
    verdict = judge([outcome()], ANSWERS, [])
    assert (verdict.equal, verdict.lost, verdict.duplicated, verdict.faults) == (1, 0, 0, [])


@pytest.mark.parametrize(
    ("fields", "lost", "duplicated", "words"),
    [
        ({"texts": {0: "one"}, "completion_tokens": 3}, 1, 0, "parts at character 3"),
        ({"texts": {0: "one two two"}, "completion_tokens": 5}, 0, 1, "parts at character 7"),
        ({"texts": {0: "one too"}}, 0, 0, "parts at character 5"),
        ({"reasons": {0: "stop"}}, 0, 0, "expected"),
        ({"breach": "[DONE] came twice"}, 0, 0, "twice"),
        ({"end": "error", "completion_tokens": 0, "detail": "oops"}, 4, 0, "oops"),
        ({"end": "hung", "completion_tokens": 0}, 4, 0, "hung"),
        ({"end": "broken", "completion_tokens": 0}, 4, 0, "broken"),  # by a process that nobody killed
        ({"end": "refused", "status": 500}, 0, 0, "refused (500)"),
        ({"end": "refused", "status": 503, "ended_s": 1.5}, 0, 0, "refused (503)"),  # while all was well
        ({"end": "unreachable", "owner": 0, "ended_s": 1.5}, 0, 0, "unreachable"),
    ],
)
def test_faults_are_found(fields: dict[str, object], lost: int, duplicated: int, words: str) -> None:
    verdict = judge([outcome(**fields)], ANSWERS, [api_blow()])
    assert (verdict.equal, verdict.lost, verdict.duplicated) == (1 if "breach" in fields else 0, lost, duplicated)
    assert len(verdict.faults) == 1
    assert words in verdict.faults[0]


def test_what_a_killed_api_process_takes_with_it_is_expected() -> None:
    blow = api_blow()
    broken = outcome(end="broken", owner=12, completion_tokens=0)
    refused = outcome(end="refused", status=503, ended_s=6.0)
    nobody = outcome(end="unreachable", owner=0, ended_s=6.0)
    verdict = judge([broken, refused, nobody], ANSWERS, [blow])
    assert (verdict.broken_with_api, verdict.refused, verdict.unreachable, verdict.faults) == (1, 1, 1, [])
    elsewhere = Blow((WORKER,), recovering=False, at_s=5.0, ready_s=7.0, pids=[13])
    assert len(judge([broken, nobody], ANSWERS, [elsewhere]).faults) == 2


def test_events_after_an_end_are_a_breach() -> None:
    text = b'{"choices": [{"index": 0, "text": "a", "finish_reason": null}]}'
    last = b'{"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}'
    seen = Outcome(0, 0.0, texts={}, reasons={}, arrivals=[])
    for event in (text, last, b"[DONE]"):
        take(seen, event, 1.0)
    assert (seen.end, seen.breach, seen.texts, seen.reasons) == ("ended", "", {0: "a"}, {0: "length"})
    take(seen, text, 2.0)
    assert "after" in seen.breach
    twice = Outcome(0, 0.0, texts={}, reasons={}, arrivals=[])
    for event in (last, b"[DONE]", b"[DONE]"):
        take(twice, event, 1.0)
    assert "twice" in twice.breach


def test_a_pause_is_the_longest_silence_from_the_blow_until_all_is_ready() -> None:
    blow = Blow((WORKER,), recovering=False, at_s=5.0, ready_s=8.0)
    through = outcome(arrivals=[1.0, 4.0, 5.1, 7.9, 8.5, 20.0])
    before = outcome(arrivals=[1.0, 4.0])
    later = outcome(arrivals=[6.0, 9.0])
    (found,) = pauses([through, before, later], [blow])
    assert (found.kind, found.blows, found.recovery) == ("worker", 1, [3.0])
    assert found.streams == [pytest.approx(2.8)]


def test_who_waits_for_the_blow_before_does_not_count_for_the_next_one() -> None:
    first, second = (Blow((WORKER,), recovering=False, at_s=at_s, ready_s=at_s + 3.0) for at_s in (5.0, 9.0))
    waiting = outcome(arrivals=[4.0, 20.0])
    back = outcome(arrivals=[4.0, 8.5, 11.0])
    (found,) = pauses([waiting, back], [first, second])
    assert found.streams == [pytest.approx(16.0), pytest.approx(4.5), pytest.approx(2.5)]


def test_the_schedule_hits_every_service_pairs_and_the_recovering() -> None:
    blows = schedule(Topology().programs(), 60, seed=1)
    assert sum(len(blow.victims) for blow in blows) >= 60
    singles = {blow.victims[0].service for blow in blows if len(blow.victims) == 1}
    assert singles == {"api", "tokenizer", "scheduler", "worker"}
    assert any(len(blow.victims) == 2 for blow in blows)
    assert any(blow.recovering for blow in blows)
    assert blows == schedule(Topology().programs(), 60, seed=1)


def test_asks_are_varied_and_repeatable() -> None:
    made = asks(16)
    assert made == asks(16)
    assert sum(ask.body["temperature"] == 0 for ask in made) == 8
    assert any(ask.body.get("n") == 2 for ask in made)
    assert {ask.path for ask in made} == {"/v1/completions", "/v1/chat/completions"}
    stopped = with_stops(made, {ask.number: "abcdefghijklmnop" for ask in made})
    assert {ask.body["stop"] for ask in stopped if ask.stops} == {"klmnop"}
    assert not any("stop" in ask.body for ask in stopped if not ask.stops)


def test_growth_is_told_from_noise() -> None:
    chance = random.Random(7)
    times = [float(second) for second in range(600)]
    noise = [100 + chance.gauss(0, 1) for _ in times]
    noise[300] = 400.0  # one peak
    flat = growth(times, noise, warm_s=60, tolerance_mib=1)
    assert flat is not None and flat.flat
    leak = growth(times, [mib + t / 60 for t, mib in zip(times, noise, strict=True)], warm_s=60, tolerance_mib=1)
    assert leak is not None and not leak.flat
    assert leak.mib_per_hour == pytest.approx(60, rel=0.2)
    filling = growth(times, [min(t, 50.0) for t in times], warm_s=60, tolerance_mib=1)
    assert filling is not None and filling.flat
    assert growth(times[:90], noise[:90], warm_s=60, tolerance_mib=1) is None
