"""What comes before the first worker group. Owned by the fleet, which reads it when that group is there.

Nothing is known about the model until then, so requests cannot be judged; a scheduler's successor gets all open
requests of its predecessor in its first moments.
"""

from common.errors import RejectReason
from common.protocol import Abort, Admit, Pause, Refused, Stop, tokenizer_of
from services.scheduler.events import ApiLost, FleetEvent, SendRefused, TokenizerLost


class Early:
    """`limit`: requests, their ends included, beyond which new ones are refused."""

    def __init__(self, limit: int) -> None:
        self.events: list[FleetEvent] = []
        self._limit = limit

    def add(self, event: Admit | Abort | Stop | Pause | ApiLost | TokenizerLost) -> SendRefused | None:
        """Keeps it; the answer where a new request finds no room. What was accepted before always does."""
        if isinstance(event, ApiLost | TokenizerLost):
            if self.events:
                self.events.append(event)
        elif len(self.events) < self._limit:
            self.events.append(event)
        elif isinstance(event, Admit):
            return self._squeeze(event)
        return None

    def _squeeze(self, admit: Admit) -> SendRefused | None:
        if admit.output or admit.origin >= 0 or admit.again:
            self.events.append(admit)
        elif not any(isinstance(event, Admit) and event.seq_id == admit.seq_id for event in self.events):
            text = "the scheduler has just started and its queue is full"
            return SendRefused(tokenizer_of(admit.seq_id), Refused(admit.seq_id, RejectReason.OVERLOADED, text))
        return None
