"""W3C Trace Context: which trace a request belongs to, and which span is the parent of what is done for it. Pure.

Messages carry it as one text, empty where nothing is recorded: `traceparent`, and behind a space `tracestate`. Only
sampled requests have one, so nothing else asks whether traces are on.
"""

import re
from typing import NamedTuple

from xxhash import xxh3_64_hexdigest

TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
TRACESTATE = re.compile(r"[\x20-\x7e]{0,512}")
SAMPLED = 1


class Trace(NamedTuple):
    """`span_id` is that of the parent of whatever comes next."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16
    state: str = ""  # tracestate, which is handed on as it came

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"

    @property
    def text(self) -> str:
        """As messages carry it."""
        return f"{self.traceparent} {self.state}" if self.state else self.traceparent

    def within(self, span_id: str) -> "Trace":
        return self._replace(span_id=span_id)


def parse(traceparent: str, tracestate: str = "") -> tuple[Trace, bool] | None:
    """The caller's trace and whether it is sampled; None for what is none, which the standard says to ignore."""
    found = TRACEPARENT.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not (int(trace_id, 16) and int(span_id, 16)):
        return None
    state = tracestate.strip()
    return Trace(trace_id, span_id, state if TRACESTATE.fullmatch(state) else ""), bool(int(flags, 16) & SAMPLED)


def read(text: str) -> Trace | None:
    """What a message carries."""
    traceparent, _, state = text.partition(" ")
    found = parse(traceparent, state)
    return found[0] if found else None


def within(text: str, span_id: str) -> str:
    """For whom that span is the parent; empty if `text` is no trace."""
    trace = read(text)
    return trace.within(span_id).text if trace else ""


def span_id_of(text: str, seq_id: int, seed: int) -> str:
    """The span of a sequence in one process: known before it ends, so that others can name it as their parent."""
    return xxh3_64_hexdigest(f"{text} {seq_id}".encode(), seed)
