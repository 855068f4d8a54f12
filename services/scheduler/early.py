"""What comes before the first worker group. Owned by the fleet, which reads it when that group is there.

Nothing is known about the model until then, so requests cannot be judged; a scheduler's successor gets all open
requests of its predecessor in its first moments.
"""

from common.errors import RejectReason
from common.protocol import Abort, Admit, Pause, Refused, Stop, tokenizer_of
from services.scheduler.events import ApiLost, FleetEvent, SendRefused, TokenizerLost


class Early:
    """`limit`: events beyond which new requests are refused. What befalls a kept request is always kept: its last pause
    or its end might never be said again.
    """

    def __init__(self, limit: int) -> None:
        self.events: list[FleetEvent] = []
        self._names: set[tuple[int, int]] = set()  # first id and n of the requests
        self._limit = limit

    def add(self, event: Admit | Abort | Stop | Pause | ApiLost | TokenizerLost) -> SendRefused | None:
        """Keeps it; the answer where a new request finds no room. What was accepted before always does."""
        if isinstance(event, ApiLost | TokenizerLost):
            if self.events:
                self.events.append(event)
        elif isinstance(event, Admit):
            return self._admit(event)
        elif len(self.events) < self._limit or self._keeps(event.seq_id):
            self._note(event)
        return None

    def _keeps(self, seq_id: int) -> bool:
        return any(
            event.seq_id <= seq_id < event.seq_id + event.n or event.origin == seq_id
            for event in self.events
            if isinstance(event, Admit)
        )

    def _note(self, event: Abort | Stop | Pause) -> None:
        """Once of each kind, so that repeats take no room; of pauses the last one counts."""
        if isinstance(event, Pause):
            self.events = [
                kept for kept in self.events if not (isinstance(kept, Pause) and kept.seq_id == event.seq_id)
            ]
        elif event in self.events:
            return
        self.events.append(event)

    def _admit(self, admit: Admit) -> SendRefused | None:
        """A repeat is one request, which must not be refused once and run once; what was accepted before counts."""
        accepted = bool(admit.output or admit.origin >= 0 or admit.again)
        name = admit.seq_id, admit.n
        if name in self._names:
            if accepted:
                same = (isinstance(kept, Admit) and (kept.seq_id, kept.n) == name for kept in self.events)
                self.events[list(same).index(True)] = admit
            return None
        if not accepted and len(self.events) >= self._limit:
            text = "the scheduler has just started and its queue is full"
            return SendRefused(tokenizer_of(admit.seq_id), Refused(admit.seq_id, RejectReason.OVERLOADED, text))
        self.events.append(admit)
        self._names.add(name)
        return None
