"""The tokens of a step in which rows under a grammar sample: drawn after the step before is known. Used by the runner.

Such a step's other rows are drawn with it, as ever; these are drawn again from its logits by `settle`, when their
matchers have taken the tokens before and their masks are made, which is while the device still runs the step.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from common.protocol import RowFault
from services.worker.grammars import Bound
from services.worker.state import Ints


class Held(NamedTuple):
    """B rows of a step, with what is needed to draw for them."""

    rows: list[Bound]
    places: Ints  # [B], in the step
    sampled: Ints  # [B], among the step's rows that sample
    slots: Ints  # [B]
    context: Ints  # [B], tokens before the one that is drawn
    columns: Ints  # [B], in the line of results
    line: Ints  # columns of all the step's rows that sample
    logits: Tensor  # [B, V], the step's own


class Tokens(Protocol):
    def ready(self) -> bool: ...

    def tokens(self) -> bytes: ...


Drawn = tuple[Tokens, list[RowFault]]


class HeldTokens:
    """As StepTokens. `draw` starts the drawing, `feed` gives the rows the tokens that came of it."""

    def __init__(
        self, held: Held, draw: Callable[["HeldTokens"], Drawn], feed: Callable[[Sequence[Bound], np.ndarray], None]
    ) -> None:
        self.held, self.faults = held, list[RowFault]()
        self._draw, self._feed = draw, feed
        self._drawn: Tokens | None = None
        self._known: bytes | None = None

    def settle(self) -> None:
        """Starts the drawing; waits for the step before, not for this one."""
        if self._drawn is None:
            self._drawn, self.faults = self._draw(self)

    def ready(self) -> bool:
        """Whether `tokens` would return without waiting."""
        return self._known is not None or (self._drawn is not None and self._drawn.ready())

    def tokens(self) -> bytes:
        """_i32 sampled tokens in the plan's order of rows; waits for the device."""
        if self._known is None:
            self.settle()
            assert self._drawn is not None
            self._known = self._drawn.tokens()
            self._feed(self.held.rows, np.frombuffer(self._known, np.int32)[self.held.sampled])
        return self._known
