"""A bound for reasoning: after so many tokens its end is written for the model, which then answers. Pure.

A request with a bound runs in two parts. The first one ends at the bound, by its length; the second goes on behind
that output, and behind the end of reasoning where that is still open. Both are ordinary work for a scheduler, which
finds the first part's KV in its prefix cache; what is true of a sequence that comes back after a loss is true of it.
"""

from array import array
from typing import NamedTuple

import msgspec

from common.dialects.dialect import ReasoningDialect
from common.dialects.registry import Dialects, Reader
from common.protocol import Sampling
from common.vocabulary import Vocabulary


class Thinking(NamedTuple):
    """Of a request."""

    until: int  # output tokens of the first part: the bound, and what begins reasoning
    end: tuple[int, ...]  # tokens that end reasoning
    dialect: ReasoningDialect
    opened: bool  # the prompt has begun it

    def first(self, sampling: Sampling) -> Sampling:
        """For the first part."""
        return msgspec.structs.replace(sampling, max_tokens=min(self.until, sampling.max_tokens))

    def left(self, output: "array[int]", most: int, words: Vocabulary) -> tuple[int, ...] | None:
        """What is to be written behind a part that has ended by its length; None: this was the end. `most`: tokens
        of the whole output."""
        if not self.until <= len(output) < most:
            return None
        reader = Reader(Dialects(None, self.dialect), None, self.opened)
        reader.feed(words.decode(output))
        reader.finish()
        return self.end[: most - len(output)] if reader.reasons else ()
