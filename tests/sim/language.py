"""What the fake worker computes: a token is a function of its sequence's own tokens, salt and seed, of nothing else.

`Stream.alone` is what a sequence must give whatever runs beside it.
"""

from dataclasses import dataclass

from common.pooling import Pooling
from common.protocol import FinishReason, Sampling

MASK = 2**64 - 1


def start(salt: int) -> int:
    """The history before the first token. Salts are part of it, so that shared KV across salts is seen."""
    return mix(salt, 0x9E3779B97F4A7C15)


def mix(history: int, token: int) -> int:
    """The history with one more token; stands for the KV of that token's position."""
    mixed = (history ^ token + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & MASK
    return mixed ^ mixed >> 29


def sample(history: int, sampling: Sampling, index: int, vocab_size: int, eos: tuple[int, ...]) -> int:
    """Output token number `index`. Ends are masked before `min_tokens`, as a worker does."""
    token = mix(history, sampling.seed) % vocab_size
    while index < sampling.min_tokens and (token in eos or token in sampling.stop_token_ids):
        token = (token + 1) % vocab_size
    return token


def pooled(histories: list[int], pooling: Pooling) -> bytes:
    """Two numbers of 4 bytes, of what was computed in one stay."""
    return (histories[-1] if pooling.mode == "last" else sum(histories) & MASK).to_bytes(8, "little")


@dataclass(frozen=True)
class Stream:
    """A whole output and why it ends."""

    tokens: tuple[int, ...]
    reason: FinishReason
    vector: bytes = b""

    @staticmethod
    def alone(
        prompt: list[int], salt: int, sampling: Sampling, longest: int, vocab_size: int, eos: tuple[int, ...]
    ) -> "Stream":
        history, histories = start(salt), []
        for token in prompt:
            history = mix(history, token)
            histories.append(history)
        if (pooling := sampling.report.pooling) is not None:
            return Stream((), FinishReason.EOS, pooled(histories, pooling))
        tokens: list[int] = []
        while len(tokens) < sampling.max_tokens and len(prompt) + len(tokens) < longest:
            index = len(tokens)
            token = sample(history, sampling, index, vocab_size, eos)
            tokens.append(token)
            history = mix(history, token)
            if index >= sampling.min_tokens:
                if token in eos and not sampling.ignore_eos:
                    return Stream(tuple(tokens), FinishReason.EOS)
                if token in sampling.stop_token_ids:
                    return Stream(tuple(tokens), FinishReason.STOP_TOKEN)
        return Stream(tuple(tokens), FinishReason.LENGTH)
