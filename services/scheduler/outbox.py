"""Collects what tokenizers must hear, one TokenBatch per tokenizer and step.

Owned by the core's state; drained by the core after each step result and at the end of each call.
"""

import msgspec

from common.columns import pack_i32, pack_u64
from common.logprobs import TokenLogprobs
from common.protocol import Finished, TokenBatch, tokenizer_of
from services.scheduler.events import SendTokens


class Outbox:
    """Rows in the order they were added, so a sequence's tokens stay in order."""

    def __init__(self) -> None:
        self._batches: dict[int, TokenBatch] = {}  # by tokenizer; all but their columns still grows
        self._accepted: dict[int, list[int]] = {}  # by tokenizer: first ids, for its next batch

    def add_rows(self, tokenizer: int, seq_ids: bytes, first_index: bytes, tokens: bytes) -> None:
        """Columns as in TokenBatch."""
        batch = self._batches.get(tokenizer)
        if batch is None:
            self._batches[tokenizer] = TokenBatch(seq_ids, first_index, tokens, [])
        else:
            self._batches[tokenizer] = TokenBatch(
                batch.seq_ids + seq_ids,
                batch.first_index + first_index,
                batch.tokens + tokens,
                batch.finished,
                logprobs=batch.logprobs,
                cached=batch.cached,
            )

    def add_row(self, seq_id: int, index: int, token: int) -> None:
        self.add_rows(tokenizer_of(seq_id), pack_u64((seq_id,)), pack_i32((index,)), pack_i32((token,)))

    def add_logprobs(self, seq_id: int, logprobs: TokenLogprobs) -> None:
        """Of one step, which also has the sequence's tokens; or of its prompt."""
        self._batch(tokenizer_of(seq_id)).logprobs[seq_id] = logprobs

    def add_cached(self, seq_id: int, cached_tokens: int) -> None:
        """With its first token: a tokenizer may end it before its terminal comes."""
        self._batch(tokenizer_of(seq_id)).cached[seq_id] = cached_tokens

    def finish(self, finished: Finished) -> None:
        self._batch(tokenizer_of(finished.seq_id)).finished.append(finished)

    def accept(self, seq_id: int) -> None:
        """A request is in the queue. That alone is no reason for a batch."""
        self._accepted.setdefault(tokenizer_of(seq_id), []).append(seq_id)

    def tell_accepted(self) -> None:
        """Now it is: no batch may come for long."""
        for tokenizer in self._accepted:
            self._batch(tokenizer)

    def _batch(self, tokenizer: int) -> TokenBatch:
        return self._batches.setdefault(tokenizer, TokenBatch(b"", b"", b"", []))

    def drain(self) -> list[SendTokens]:
        if not self._batches:
            return []
        for tokenizer in [tokenizer for tokenizer in self._accepted if tokenizer in self._batches]:
            batch, accepted = self._batches[tokenizer], pack_u64(self._accepted.pop(tokenizer))
            self._batches[tokenizer] = msgspec.structs.replace(batch, accepted=accepted)
        sends = [SendTokens(tokenizer, batch) for tokenizer, batch in self._batches.items()]
        self._batches = {}
        return sends
