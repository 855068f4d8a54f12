"""What the outcomes of a chaos run mean: which breaks were to be expected, what was lost or said twice, how long the
silences were. Pure: all it knows are the expected answers, the blows with their times, and the outcomes.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from benchmarks.chaos.client import Outcome
from valence.programs import Program

GRACE_S = 15.0  # after all is ready, until every API has heard of it; on a busy machine


class Answer(NamedTuple):
    """What an undisturbed system says, choice by choice."""

    texts: dict[int, str]
    reasons: dict[int, str]
    prompt_tokens: int
    completion_tokens: int


def answer_of(outcome: Outcome) -> Answer:
    return Answer(outcome.texts, outcome.reasons, outcome.prompt_tokens, outcome.completion_tokens)


class Blow(msgspec.Struct):
    """One hit, of one process or several at once. `ready_s`: all was well again (or the next blow came first)."""

    victims: tuple[Program, ...]
    recovering: bool  # it came while an earlier one was being recovered from
    at_s: float = 0.0
    ready_s: float = 0.0
    pids: list[int] = []
    disturbed: bool = False  # another blow came before all was well

    @property
    def kind(self) -> str:
        if self.recovering or self.disturbed:
            return "while recovering"
        names = sorted({victim.service for victim in self.victims})
        if len(self.victims) < 2:
            return names[0] if names else "none"
        return "two at once"


class Verdict(NamedTuple):
    """`lost` and `duplicated` count tokens of streams that ended; `faults` says all that should not have been."""

    streams: int
    equal: int  # ended with the text of the undisturbed run
    broken_with_api: int  # their API process was killed
    refused: int  # before anything was accepted, while something was down
    unreachable: int  # no API process was there, or it died before it took the connection
    lost: int
    duplicated: int
    faults: list[str]


def judge(outcomes: Sequence[Outcome], answers: Mapping[int, Answer], blows: Sequence[Blow]) -> Verdict:
    count: Counter[str] = Counter()
    faults: list[str] = []
    for outcome in outcomes:
        fault = _judge(outcome, answers[outcome.ask], blows, count)
        if outcome.breach:
            fault = outcome.breach
        if fault:
            when = f"from {outcome.opened_s:.2f} to {outcome.ended_s:.2f} s"
            faults.append(f"ask {outcome.ask}, {when}, at pid {outcome.owner}: {fault}")
    return Verdict(
        streams=len(outcomes),
        equal=count["equal"],
        broken_with_api=count["broken"],
        refused=count["refused"],
        unreachable=count["unreachable"],
        lost=count["lost"],
        duplicated=count["duplicated"],
        faults=faults,
    )


def _judge(outcome: Outcome, answer: Answer, blows: Sequence[Blow], count: Counter[str]) -> str:
    """Counts the outcome; what is wrong with it, or nothing."""
    if outcome.end == "ended":
        if answer_of(outcome) == answer:
            count["equal"] += 1
            return ""
        missing = answer.completion_tokens - outcome.completion_tokens
        count["lost"] += max(missing, 0)
        count["duplicated"] += max(-missing, 0)
        return f"another answer: {difference(answer, answer_of(outcome))}"
    if outcome.end == "broken" and _killed(outcome, blows):
        count["broken"] += 1
        return ""
    if outcome.end == "refused" and outcome.status in (429, 503) and _down(outcome.ended_s, blows):
        count["refused"] += 1
        return ""
    if outcome.end in ("unreachable", "broken") and not outcome.owner and _api_down(outcome, blows):
        count["unreachable"] += 1
        return ""
    count["lost"] += answer.completion_tokens - outcome.completion_tokens
    return f"{outcome.end} ({outcome.status}): {outcome.detail}"


def _killed(outcome: Outcome, blows: Sequence[Blow]) -> bool:
    return bool(outcome.owner) and any(outcome.owner in blow.pids for blow in blows)


def _down(at_s: float, blows: Sequence[Blow]) -> bool:
    return any(blow.victims and blow.at_s <= at_s <= (blow.ready_s or at_s) + GRACE_S for blow in blows)


def _api_down(outcome: Outcome, blows: Sequence[Blow]) -> bool:
    """Whether an API process was being replaced at some time of the outcome."""
    return any(
        outcome.ended_s >= blow.at_s and outcome.opened_s <= (blow.ready_s or outcome.opened_s) + GRACE_S
        for blow in blows
        if any(victim.service == "api" for victim in blow.victims)
    )


def difference(expected: Answer, got: Answer) -> str:
    """Where two answers part, for people."""
    for index, text in expected.texts.items():
        other = got.texts.get(index, "")
        if other != text:
            same = next(
                (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other))
            )
            return (
                f"choice {index} parts at character {same} of {len(text)} (got {len(other)}), "
                f"expected {text[same:][:40]!r}, got {other[same:][:40]!r}"
            )
    return f"expected {expected[1:]}, got {got[1:]}"


class Pauses(NamedTuple):
    """Silences of the streams that were running at the blows of one kind, seconds."""

    kind: str
    blows: int
    streams: list[float]
    recovery: list[float]  # of each blow, until all was ready again

    @property
    def median_s(self) -> float:
        return statistics.median(self.streams) if self.streams else 0.0

    @property
    def most_s(self) -> float:
        return max(self.streams, default=0.0)


def pauses(outcomes: Sequence[Outcome], blows: Sequence[Blow]) -> list[Pauses]:
    """By kind of blow. A stream's pause is its longest silence that reaches into the time from the blow to all ready.

    Counted are streams that had text since all was well before, and ended well, or at least went on after it; those of
    a killed API did not. Who was silent already waits for an earlier blow's end.
    What was on its way at the blow still arrives after it: hence not simply the silence around the moment of the blow.
    """
    found: dict[str, Pauses] = {}
    for blow in blows:
        kind = found.setdefault(blow.kind, Pauses(blow.kind, 0, [], []))
        well_s = max((other.ready_s for other in blows if other.victims and other.ready_s < blow.at_s), default=0.0)
        streams = [pause for outcome in outcomes if (pause := _pause(outcome, blow, well_s)) is not None]
        kind.streams.extend(streams)
        kind.recovery.append(blow.ready_s - blow.at_s)
        found[blow.kind] = kind._replace(blows=kind.blows + 1)
    return list(found.values())


def _pause(outcome: Outcome, blow: Blow, well_s: float) -> float | None:
    times = outcome.arrivals
    resumed_by = blow.at_s if outcome.end == "ended" else blow.ready_s
    if not any(well_s < at_s < blow.at_s for at_s in times) or not resumed_by < times[-1]:
        return None
    gaps = [(a, b) for a, b in itertools.pairwise(times) if b > blow.at_s and a < blow.ready_s]
    return max(b - a for a, b in gaps)
