"""What the core says of a sequence, as events of the flight recorder. Called by the core through the process shell.

A story may quote an error's text, which may name tokens: only the reason of an end goes on.
"""

from common.protocol import FinishReason
from common.recorder import Recorder

REASONS = {reason.name: reason for reason in FinishReason}


class Journal:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def note(self, seq_id: int, text: str) -> None:
        """`text` is a line of the sequence's story: "row in step 5 ...", "LENGTH", "ERROR the device ..."."""
        reason = REASONS.get(text.partition(" ")[0])
        if reason is None:
            self._recorder.sequence(seq_id, text)
        else:
            self._recorder.sequence(seq_id, reason.name, reason)
