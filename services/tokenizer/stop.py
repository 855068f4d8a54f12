"""Finds stop strings in a text that comes in pieces. Pure; one StopMatcher belongs to one sequence.

Text is held back only as long as it could still become a stop string. The match that is complete first wins; of those
that are complete at the same character the first of the list. How the text is cut into pieces makes no difference.
"""


class StopMatcher:
    __slots__ = ("_firsts", "_held", "_include", "_stops")

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        """`include`: the stop string itself is part of the text."""
        self._stops = tuple(stop for stop in stops if stop)
        self._firsts = "".join({stop[0] for stop in self._stops})
        self._include = include
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that ended the sequence, if one did.

        A stop string that is completed by a piece fed with `armed` False does not count.
        """
        if not self._held and not self._may_begin(text):
            return text, None
        old, window = len(self._held), self._held + text
        if armed:
            found = self._first_match(window, old)
            if found is not None:
                end, stop = found
                self._held = ""
                return window[: end if self._include else end - len(stop)], stop
        hold = self._hold_from(window)
        self._held = window[hold:]
        return window[:hold], None

    def flush(self) -> str:
        """The end without a match: what was held back."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> bool:
        for first in self._firsts:  # noqa: SIM110 (runs for every token: any() takes three times as long)
            if first in text:
                return True
        return False

    def _first_match(self, window: str, old: int) -> tuple[int, str] | None:
        """Smallest end of a match that is completed behind the first `old` characters, and its stop string."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = start + len(stop), stop
        return best

    def _hold_from(self, window: str) -> int:
        """Where the longest end of the window begins that is the beginning of a stop string."""
        hold = len(window)
        for stop in self._stops:
            start = max(0, len(window) - len(stop) + 1)
            while (start := window.find(stop[0], start, hold)) >= 0:
                if stop.startswith(window[start:]):
                    hold = start
                    break
                start += 1
        return hold
