"""What a load asks for: prompts as token ids and exact output lengths, drawn from a seed. Pure."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LOWEST_ID = 300  # above bytes and the special tokens that some vocabularies begin with
# Conversations as in ShareGPT: the means are those of figure 11 in the PagedAttention paper (Kwon et al. 2023: 161.31
# tokens of prompt, 337.99 of output); the spread is ours: the log of both lengths has these deviations.
CHAT_PROMPT, CHAT_OUTPUT = (161.31, 1.1), (337.99, 0.8)
CHAT_LONGEST = 2048


class Ask(NamedTuple):
    """One request."""

    prompt: NDArray[np.int32]
    output_tokens: int


class Mix(NamedTuple):
    """`kind`: random, shared-prefix (all prompts begin alike) or chat (lengths as in conversations)."""

    kind: str
    prompt_tokens: int
    output_tokens: int
    prefix_tokens: int = 0


class Source:
    """Draws requests; the same seed gives the same ones, and no two share a prompt."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._highest = vocab * 98 // 100  # special tokens are at the end

    def ids(self, count: int) -> NDArray[np.int32]:
        return self._random.integers(LOWEST_ID, self._highest, count, np.int32)

    def draw(self, mix: Mix, count: int) -> list[Ask]:
        if mix.kind == "chat":
            prompts, outputs = self._lengths(CHAT_PROMPT, count), self._lengths(CHAT_OUTPUT, count)
            return [Ask(self.ids(p), int(o)) for p, o in zip(prompts.tolist(), outputs.tolist(), strict=True)]
        prefix = self.ids(mix.prefix_tokens) if mix.kind == "shared-prefix" else self.ids(0)
        own = max(mix.prompt_tokens - len(prefix), 1)
        return [Ask(np.concatenate([prefix, self.ids(own)]), mix.output_tokens) for _ in range(count)]

    def arrivals_s(self, rate: float, count: int) -> list[float]:
        """Seconds from the start of a Poisson process with `rate` arrivals per second."""
        gaps: list[float] = np.cumsum(self._random.exponential(1 / rate, count)).tolist()
        return gaps

    def _lengths(self, shape: tuple[float, float], count: int) -> NDArray[np.int64]:
        mean, deviation = shape
        drawn = self._random.lognormal(np.log(mean) - deviation**2 / 2, deviation, count)
        return np.clip(drawn.round(), 4, CHAT_LONGEST).astype(np.int64)


def body(ask: Ask, model: str) -> dict[str, Any]:
    """For /v1/completions, greedy."""
    return {
        "model": model,
        "prompt": ask.prompt.tolist(),
        "max_tokens": ask.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
