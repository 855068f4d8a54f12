"""The rows that step with drafts, and whether rows do so at all. Owned by the core's view of one worker.

Drafts cost the worker tokens to verify and pay where those are cheaper than steps: not in large batches, and not where
few of them hold. `Switch` learns from results which is the case, in classes of batch sizes, and decides anew when the
other way has become faster by a margin. What is not in use it tries at growing intervals, for a few steps.
"""

from collections import deque

from services.scheduler.request import Row

WINDOW = 32  # steps that are remembered of each way and class
FEWEST = 12  # steps that say something
MARGIN = 1.05  # by so much must the other way be faster
FIRST_TRIAL, LAST_TRIAL = 256, 16_384  # steps before the other way is tried: doubled whenever that was for nothing
DWELL = 8  # steps of one way before the other may follow: going over costs a gap
COMEBACK = 0.75  # of the most rows, before drafts come back after there were too many


class Class:
    """Batches of about the same size."""

    def __init__(self) -> None:
        self.steps: dict[bool, deque[tuple[float, int]]] = {way: deque(maxlen=WINDOW) for way in (False, True)}
        self.drafts = True
        self.trial = False
        self._since = 0  # steps of the present way
        self._interval = WINDOW  # the first comparison comes soon

    def token_s(self, drafts: bool) -> float:
        """Seconds per token of this way; 0 before anything was learned."""
        steps = self.steps[drafts]
        if len(steps) < FEWEST:
            return 0.0
        slowest = max(steps)  # an interruption of the host says nothing
        tokens = sum(count for _, count in steps) - slowest[1]
        return (sum(seconds for seconds, _ in steps) - slowest[0]) / max(tokens, 1)

    def note(self, drafted: bool, seconds: float, tokens: int) -> None:
        self.steps[drafted].append((seconds, tokens))
        if drafted is not self.drafts:
            return
        self._since += 1
        if self.trial:
            if self._since >= FEWEST:
                self._judge()
        elif self._since >= self._interval:
            self.drafts, self.trial, self._since = not self.drafts, True, 0
            self.steps[self.drafts].clear()

    def _judge(self) -> None:
        """After a trial: the faster way stays, the one before it unless the margin is reached."""
        better = self.token_s(self.drafts) * MARGIN < self.token_s(not self.drafts)
        self.trial, self._since = False, 0
        if better:
            self._interval = FIRST_TRIAL
        else:
            self.drafts = not self.drafts
            self._interval = min(max(2 * self._interval, FIRST_TRIAL), LAST_TRIAL)


class Switch:
    """`most_rows`: beyond, there are no drafts."""

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self._classes: dict[int, Class] = {}
        self._crowded = False
        self._way, self._since = True, DWELL

    def _class(self, rows: int) -> Class:
        return self._classes.setdefault(rows.bit_length(), Class())

    def note(self, drafted: bool, rows: int, seconds: float, tokens: int) -> None:
        """A step of `rows` rows that only generates has given so many tokens in this time."""
        self._since += 1
        self._class(rows).note(drafted, seconds, tokens)

    def wants(self, rows: int) -> bool:
        """Whether the next step of `rows` rows shall have drafts."""
        self._crowded = rows > self._most_rows * (COMEBACK if self._crowded else 1.0)
        wanted = not self._crowded and self._class(rows).drafts
        if wanted is not self._way and self._since >= DWELL:
            self._way, self._since = wanted, 0
        return self._way


class DraftRows:
    """`tokens`: the most drafts of one row; 0: the worker proposes none. `on`: rows that generate are among `rows`."""

    def __init__(self, tokens: int, most_rows: int) -> None:
        self.tokens = tokens
        self.on = tokens > 0
        self.rows: dict[int, Row] = {}  # by slot
        self.switch = Switch(most_rows)

    def join(self, row: Row) -> None:
        self.rows[row.slot] = row

    def leave(self, row: Row) -> None:
        del self.rows[row.slot]
