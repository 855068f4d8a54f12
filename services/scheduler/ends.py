"""Token-level ends: end-of-sequence and stop tokens. Length ends are known ahead and live in the planner.

`StopTokens` is owned by the core's state and changes as sequences come and go.
"""

import numpy as np
from numpy.typing import NDArray

from common.protocol import FinishReason, Sampling


class StopTokens:
    """Which tokens may end any live sequence, as one table over the vocabulary.

    Almost every token is none, so that a step is checked with one table lookup; what is flagged is looked at singly.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.eos = frozenset(eos_token_ids)
        self._table = np.zeros(vocab_size, np.uint8)
        self._users: dict[int, int] = {}
        self._count(eos_token_ids, 1)

    def flags(self, tokens: NDArray[np.uint32]) -> bytes:
        """One byte per token, 1 if it may end a sequence. Raises IndexError for a token outside the vocabulary."""
        return self._table.take(tokens).tobytes()

    def add(self, sampling: Sampling) -> None:
        if sampling.stop_token_ids:
            self._count(sampling.stop_token_ids, 1)

    def remove(self, sampling: Sampling) -> None:
        if sampling.stop_token_ids:
            self._count(sampling.stop_token_ids, -1)

    def _count(self, token_ids: tuple[int, ...], change: int) -> None:
        for token in token_ids:
            if 0 <= token < len(self._table):
                users = self._users.get(token, 0) + change
                self._users[token] = users
                self._table[token] = users > 0
                if users == 0:
                    del self._users[token]

    def reason(self, sampling: Sampling, token: int, index: int) -> FinishReason | None:
        """Why output token number `index` ends the sequence. Before `min_tokens` of output nothing does.

        Under a grammar the worker knows when an end may come: it is drawn where nothing else may.
        """
        if index < sampling.min_tokens and sampling.grammar is None:
            return None
        if token in self.eos and not (sampling.ignore_eos and sampling.grammar is None):
            return FinishReason.EOS
        return FinishReason.STOP_TOKEN if token in sampling.stop_token_ids else None
