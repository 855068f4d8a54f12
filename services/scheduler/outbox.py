"""Collects what tokenizers must hear, one TokenBatch per tokenizer and step.

Owned by the core's state; drained by the core after each step result and at the end of each call.
"""

from common.columns import pack_i32, pack_u64
from common.protocol import Finished, TokenBatch, tokenizer_of
from services.scheduler.events import SendTokens


class _Draft:
    __slots__ = ("finished", "first_index", "seq_ids", "tokens")

    def __init__(self, seq_ids: bytes = b"", first_index: bytes = b"", tokens: bytes = b"") -> None:
        self.seq_ids = seq_ids
        self.first_index = first_index
        self.tokens = tokens
        self.finished: list[Finished] = []


class Outbox:
    """Rows in the order they were added, so a sequence's tokens stay in order."""

    def __init__(self) -> None:
        self._drafts: dict[int, _Draft] = {}

    def add_rows(self, tokenizer: int, seq_ids: bytes, first_index: bytes, tokens: bytes) -> None:
        """Columns as in TokenBatch."""
        draft = self._drafts.get(tokenizer)
        if draft is None:
            self._drafts[tokenizer] = _Draft(seq_ids, first_index, tokens)
        else:
            draft.seq_ids += seq_ids
            draft.first_index += first_index
            draft.tokens += tokens

    def add_row(self, seq_id: int, index: int, token: int) -> None:
        self.add_rows(tokenizer_of(seq_id), pack_u64((seq_id,)), pack_i32((index,)), pack_i32((token,)))

    def finish(self, finished: Finished) -> None:
        tokenizer = tokenizer_of(finished.seq_id)
        draft = self._drafts.get(tokenizer)
        if draft is None:
            draft = self._drafts[tokenizer] = _Draft()
        draft.finished.append(finished)

    def drain(self) -> list[SendTokens]:
        if not self._drafts:
            return []
        sends = [
            SendTokens(tokenizer, TokenBatch(draft.seq_ids, draft.first_index, draft.tokens, draft.finished))
            for tokenizer, draft in self._drafts.items()
        ]
        self._drafts.clear()
        return sends
