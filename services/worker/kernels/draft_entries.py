"""What ops of layers with a state must know of a step with drafts (worker/drafts.py, ADR 0039). Values only."""

from typing import NamedTuple

from torch import Tensor


class DraftEntries(NamedTuple):
    """Of a step whose first rows that decode are entries of rows with drafts. R rows of the step."""

    offsets: Tensor  # int32 [R]: of the token behind its row's newest one; 0 and less: a row begins with it
    slots: Tensor  # int32 [R]
    held: Tensor  # int32 [rows], by slot: drafts of the row's last step that held, which its state lacks
