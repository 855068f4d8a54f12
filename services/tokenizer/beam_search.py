"""Beam search: which outputs to go on with, by the sums of their tokens' log-probabilities. Pure.

As transformers has it, ends, length penalty and early stopping included: of all continuations the best max(2, 1 +
number of ends) times `width` are looked at; what ends among the first `width` of these is finished, the first `width`
that do not end go on. A finished output's score is its sum divided by its length to the power of `length_penalty`.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from common.text_format import Beams

STOP_EARLY, NEVER = 1, 2  # of Beams.early


class Candidate(NamedTuple):
    """A token that may follow a beam."""

    token: int
    logprob: float
    record: bytes  # what its client is told of it (common/logprobs.py)


class Beam(NamedTuple):
    """An output; a finished one ends with a token of `ends`, or at the limit."""

    tokens: tuple[int, ...] = ()
    total: float = 0.0  # of its tokens' log-probabilities
    records: tuple[bytes, ...] = ()

    def followed(self, by: Candidate) -> "Beam":
        return Beam((*self.tokens, by.token), self.total + by.logprob, (*self.records, by.record))


def candidates_needed(width: int, num_ends: int) -> int:
    """Best tokens behind each beam that a step must know."""
    return max(2, 1 + num_ends) * width


class BeamSearch:
    def __init__(self, asked: Beams, ends: Collection[int], max_tokens: int) -> None:
        self.running = [Beam()]
        self.finished: list[tuple[float, Beam]] = []  # with their scores, the best first
        self.done = False
        self._asked, self._ends, self._max_tokens = asked, frozenset(ends), max_tokens

    def step(self, candidates: Sequence[Sequence[Candidate]]) -> None:
        """candidates: for each running beam its best continuations."""
        width, size = self._asked.width, len(self.running[0].tokens) + 1
        best = sorted(
            (
                beam.followed(candidate)
                for beam, each in zip(self.running, candidates, strict=True)
                for candidate in each
            ),
            key=lambda beam: -beam.total,
        )[: candidates_needed(width, len(self._ends))]
        at_limit = size == self._max_tokens
        ended = [at_limit or beam.tokens[-1] in self._ends for beam in best]
        scored = [(self._score(beam.total, size), beam) for beam, end in zip(best[:width], ended, strict=False) if end]
        self.finished = sorted(self.finished + scored, key=lambda pair: -pair[0])[:width]
        self.running = [beam for beam, end in zip(best, ended, strict=True) if not end][:width]
        self.done = all(ended) or self._is_over(size)

    def _score(self, total: float, size: int) -> float:
        return float(total / size**self._asked.length_penalty)

    def _is_over(self, size: int) -> bool:
        """Whether what runs cannot become better than what is finished, as far as `early` wants to know."""
        asked = self._asked
        if len(self.finished) < asked.width:
            return False
        if asked.early == STOP_EARLY:
            return True
        longest = self._max_tokens if asked.early == NEVER and asked.length_penalty > 0 else size
        return self._score(self.running[0].total, longest) <= self.finished[-1][0]
