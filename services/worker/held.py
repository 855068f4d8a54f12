"""Steps in which rows under a grammar sample: drawn after the step before is known. Owner: the runner.

Such a step's other rows are drawn with it, as ever; these are drawn again from its logits by `settle`, when their
matchers have taken the tokens before and their masks are made, which is while the device still runs the step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from common.logprobs import StepLogprobs
from common.protocol import RowFault
from services.worker.grammars import Bits, Bound, Grammars
from services.worker.state import Ints, Rows, Step


class Held(NamedTuple):
    """B rows of a step, with what is needed to draw for them."""

    rows: list[Bound]
    places: Ints  # [B], in the step
    sampled: Ints  # [B], among the step's rows that sample
    slots: Ints  # [B]
    context: Ints  # [B], tokens before the one that is drawn
    columns: Ints  # [B], in the line of results
    line: Ints  # columns of all that the step has drawn
    sizes: Ints | None  # of a step with drafts, as StepTokens has them
    logits: Tensor  # [B, V], the step's own


class Tokens(Protocol):
    def ready(self) -> bool: ...

    def tokens(self) -> bytes: ...

    def counts(self) -> tuple[bytes, bytes]: ...

    def logprobs(self) -> StepLogprobs | None: ...


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
        self._counts = b"", b""
        self._logprobs: StepLogprobs | None = None

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
            self._known, self._counts = self._drawn.tokens(), self._drawn.counts()
            self._logprobs = self._drawn.logprobs()
            sampled, counts = self.held.sampled, np.frombuffer(self._counts[0], np.uint8)
            if len(counts):
                sampled = (np.cumsum(counts, dtype=np.int64) - counts)[sampled]  # these rows have no drafts
            self._feed(self.held.rows, np.frombuffer(self._known, np.int32)[sampled])
        return self._known

    def counts(self) -> tuple[bytes, bytes]:
        """As StepTokens; waits for the device."""
        self.tokens()
        return self._counts

    def logprobs(self) -> StepLogprobs | None:
        """As StepTokens; waits for the device."""
        self.tokens()
        return self._logprobs


class HeldSteps:
    """Steps whose tokens the rows' matchers do not have yet; all but the newest are drawn.

    draw: starts the drawing for the rows of the newest step, under masks [B, ceil(V / 32)].
    """

    def __init__(self, grammars: Grammars, rows: Rows, draw: Callable[[Held, Bits], Tokens]) -> None:
        self.grammars = grammars
        self._rows, self._draw = rows, draw
        self._steps: deque[HeldTokens] = deque()

    def add(self, step: Step, entries: Step, bound: Ints, line: Ints, sizes: Ints | None, logits: Tensor) -> HeldTokens:
        """Commits a step that has run. bound: its entries under a grammar (drafts.py), of which each row has one; a
        row of them gets no drafts, so that the host knows its place."""
        slots, context = entries.slots[bound], (entries.positions + entries.counts)[bound]
        self._rows.commit(step, slots)
        places = bound if entries is step else self.grammars.bound(step)
        columns = line[(np.cumsum(entries.samples) - 1)[bound]]
        sampled = (np.cumsum(step.samples) - 1)[places]
        held = Held(self.grammars.rows(slots), places, sampled, slots, context, columns, line, sizes, logits)
        self._steps.append(HeldTokens(held, self._draw_newest, self.grammars.feed))
        return self._steps[-1]

    def settle(self) -> None:
        """Before rows change or another step runs: what waited for the step before is drawn."""
        if self._steps:
            self._steps[-1].settle()
        while self._steps and self._steps[0].ready():
            self._steps.popleft().tokens()

    def reset(self) -> None:
        """Forgets all rows."""
        self.grammars.reset()
        self._steps.clear()

    def _draw_newest(self, tokens: HeldTokens) -> Drawn:
        while self._steps[0] is not tokens:
            self._steps.popleft().tokens()  # the matchers take these
        held = tokens.held
        masks = self.grammars.masks(held.rows, held.context - self._rows.num_prompt[held.slots])
        faults = [RowFault(int(held.places[place]), message) for place, message in masks.faults.items()]
        return self._draw(held, masks.bits), faults
