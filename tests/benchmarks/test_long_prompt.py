from array import array

import pytest

from benchmarks.load import StreamResult
from benchmarks.long_prompt import LongPrompt, compare
from benchmarks.workloads import Mix


def stream(opened_s: float, times_s: list[float]) -> StreamResult:
    return StreamResult(8, len(times_s), times_s[0], times_s[-1], 0, opened_s, array("d", times_s).tobytes())


PLAN = LongPrompt(streams=2, mix=Mix("random", 8, 8), long_tokens=1000, after_s=1.0)


def test_gaps_before_are_held_against_those_during() -> None:
    decoding = stream(0.0, [0.5, 0.6, 0.7, 0.8, 1.1, 1.4, 1.7, 1.8])
    shock = compare([decoding, decoding], stream(0.85, [0.9, 1.0]), PLAN)
    assert shock.before_ms.max == pytest.approx(100) and shock.during_ms.max == pytest.approx(300)
    assert shock.chunk_ms == pytest.approx(300)  # three steps in 0.9 s
    assert shock.rise_ms == pytest.approx(200) and shock.flat()["rise_p99_ms"][1] == "ms"
    assert "kept" in str(shock.table("m").caption)
    uneven = stream(0.0, [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.7, 1.8])
    shock = compare([uneven, uneven], stream(0.85, [0.9, 0.9]), PLAN)
    assert shock.chunk_ms < shock.rise_ms and "MISSED" in str(shock.table("m").caption)


def test_streams_must_decode_from_before_until_after() -> None:
    late, short = stream(0.0, [0.9, 2.5]), stream(0.0, [0.1, 1.2])
    with pytest.raises(ValueError, match="raise --after-s"):
        compare([late], stream(0.5, [1.0]), PLAN)
    with pytest.raises(ValueError, match="raise --output"):
        compare([short], stream(0.5, [1.0]), PLAN)
