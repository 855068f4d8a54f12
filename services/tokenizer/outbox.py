"""What waits to be sent: to one API process (Outbox) and to one scheduler (Upstream).

Links may be full. Rows that could not be sent stay and grow, so nothing is lost and each sequence has at most one row.
Owned by the Streams; the process gives the functions that send.
"""

from array import array
from collections import deque
from collections.abc import Callable

import msgspec

from common.logprobs import TextLogprobs
from common.protocol import TextBatch, TextFinished, TextFormat


class Outbox:
    """Rows, terminals and replies for one API process. Columns of a row are appended together."""

    __slots__ = (
        *("accepted", "counts", "engines", "finished", "first_index", "formats", "ids", "incarnation", "logprobs"),
        *("made_s", "prompt_logprobs", "replies", "seq_ids", "texts", "turn"),
    )

    def __init__(self, incarnation: int, made_s: float) -> None:
        self.incarnation = incarnation
        self.made_s = made_s  # any monotonic clock
        self.turn = 0  # number of the batch being filled; a sequence's row number belongs to one turn
        self.seq_ids = array("Q")
        self.first_index = array("i")
        self.counts = array("i")
        self.texts: list[str] = []
        self.finished: list[TextFinished] = []
        self.accepted = array("Q")
        self.formats: list[TextFormat] = []
        self.ids: dict[int, tuple[int, bytes]] = {}
        self.engines: dict[int, int] = {}
        self.logprobs: dict[int, TextLogprobs] = {}
        self.prompt_logprobs: dict[int, TextLogprobs] = {}
        self.replies: deque[msgspec.Struct] = deque()

    def flush(self, send: Callable[[int, msgspec.Struct], bool]) -> bool:
        """Sends everything, replies first; False when something had to stay."""
        while self.replies:
            if not send(self.incarnation, self.replies[0]):
                return False
            self.replies.popleft()
        if not (self.texts or self.finished or self.accepted or self.formats or self.prompt_logprobs):
            return True
        batch = TextBatch(
            self.seq_ids.tobytes(),
            self.first_index.tobytes(),
            self.counts.tobytes(),
            self.texts,
            self.finished,
            self.accepted.tobytes(),
            self.formats,
            self.ids,
            self.engines,
            self.logprobs,
            self.prompt_logprobs,
        )
        if not send(self.incarnation, batch):
            return False
        self.turn += 1
        self.seq_ids, self.first_index, self.counts = array("Q"), array("i"), array("i")
        self.texts, self.finished, self.accepted, self.formats, self.ids = [], [], array("Q"), [], {}
        self.engines = {}
        self.logprobs, self.prompt_logprobs = {}, {}
        return True


class Upstream:
    """Messages to one scheduler, in order."""

    def __init__(self, send: Callable[[msgspec.Struct], bool]) -> None:
        self._send = send
        self._waiting: deque[msgspec.Struct] = deque()

    def offer(self, message: msgspec.Struct) -> bool:
        """Sends now or not at all."""
        return not self._waiting and self._send(message)

    def put(self, message: msgspec.Struct) -> None:
        """Sends now or, if the link is full, with a later `flush`."""
        if not self.offer(message):
            self._waiting.append(message)

    def flush(self) -> bool:
        while self._waiting:
            if not self._send(self._waiting[0]):
                return False
            self._waiting.popleft()
        return True

    def clear(self) -> None:
        """Forgets what was meant for a scheduler that is gone."""
        self._waiting.clear()
