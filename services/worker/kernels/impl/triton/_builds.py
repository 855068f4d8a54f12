"""Counts kernels that Triton has compiled in this process, or found in its cache. Written by Triton's listener only."""

from collections import Counter, deque
from typing import Any

from triton import knobs

COUNTS: Counter[str] = Counter(compiled=0, found=0)
NEWEST: deque[str] = deque(maxlen=32)  # names of functions, the last one counted last


def watch() -> None:
    """Counts from now on."""
    knobs.compilation.listener = _on_compile


def _on_compile(*, src: Any, cache_hit: bool, **details: Any) -> None:
    COUNTS["found" if cache_hit else "compiled"] += 1
    NEWEST.append(getattr(src, "name", "?"))
