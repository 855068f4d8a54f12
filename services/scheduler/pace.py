"""How long a worker's steps take, learned from their results, and when a step must be called stuck. Pure.

Owned by the core's view of one worker, so a new worker is learned anew. Steps run one after the other: a step's time
counts from the result before it, or from its own sending if the worker was idle.
"""

from collections import deque

WINDOW = 256  # steps of each kind that are remembered
QUANTILE = 0.95
FACTOR = 20.0  # times the usual step
FLOOR_S = 10.0  # never less: the host may be busy
FIRST_S = 300.0  # for sizes that have not been run: kernels may compile, graphs may be captured
FIRST_STEPS = 16  # and for the first steps of a worker
CEILING_S = 900.0  # never more, unless CEILING_FACTOR times the usual is
CEILING_FACTOR = 3.0
FEWEST_TOKENS = 32  # of a prefill whose time tells about tokens; shorter ones cost as much


class Pace:
    """`deadline_s` of the settings; 0: from measured times."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._decode_s: deque[float] = deque(maxlen=WINDOW)  # steps that only decode
        self._token_s: deque[float] = deque(maxlen=WINDOW)  # steps with known tokens, divided by their number
        self._result_s = float("-inf")  # when the last result came
        self._steps = self._most_rows = self._most_tokens = 0

    def finished(self, sent_s: float, rows: int, tokens: int, now_s: float) -> float:
        """A step's result has come: `rows` that decoded, `tokens` of prompts besides. Returns what it took."""
        elapsed_s = now_s - (sent_s if sent_s > self._result_s else self._result_s)
        self._result_s = now_s
        self._steps += 1
        if rows > self._most_rows:
            self._most_rows = rows
        if not tokens:
            self._decode_s.append(elapsed_s)
            return elapsed_s
        self._token_s.append(elapsed_s / max(tokens, FEWEST_TOKENS))
        self._most_tokens = max(self._most_tokens, tokens)
        return elapsed_s

    def usual_s(self, tokens: int) -> float:
        """What such a step has usually taken at most; 0 before anything was learned."""
        return quantile(self._decode_s) + tokens * quantile(self._token_s)

    def allowed_s(self, rows: int, tokens: int) -> float:
        """The deadline of such a step."""
        if self._deadline_s:
            return self._deadline_s
        usual_s = self.usual_s(tokens)
        allowed_s = max(FLOOR_S, FACTOR * usual_s)
        if self._steps < FIRST_STEPS or rows > self._most_rows or tokens > self._most_tokens:
            allowed_s = max(allowed_s, FIRST_S)
        return min(allowed_s, max(CEILING_S, CEILING_FACTOR * usual_s))

    def overdue(self, sent_s: float, rows: int, tokens: int, now_s: float) -> str:
        """Why the oldest step in flight is stuck; empty if it is not (yet)."""
        elapsed_s = now_s - max(sent_s, self._result_s)
        if elapsed_s <= (self._deadline_s or FLOOR_S):
            return ""  # a step's usual way out
        allowed_s = self.allowed_s(rows, tokens)
        if elapsed_s <= allowed_s:
            return ""
        return f"no result for {elapsed_s:.1f} s, {allowed_s:.1f} s are allowed for {rows} rows and {tokens} tokens"


def quantile(values: "deque[float]") -> float:
    """The value that a share QUANTILE of them does not exceed; 0 of none."""
    return sorted(values)[int(QUANTILE * (len(values) - 1))] if values else 0.0
