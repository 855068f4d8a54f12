from array import array

import numpy as np
import pytest

from benchmarks.latency import Bounds, flat, gaps_ms, summarize
from benchmarks.load import StreamResult


def stream(opened_s: float, times_s: list[float], prompt: int = 10) -> StreamResult:
    return StreamResult(
        prompt, len(times_s), times_s[0], times_s[-1], len(times_s), opened_s, array("d", times_s).tobytes()
    )


def test_figures_of_a_load() -> None:
    quick, slow = stream(100.0, [0.1, 0.2, 0.3]), stream(101.0, [1.0, 1.5, 2.0])
    found = summarize([quick, slow], Bounds(ttft_ms=500, tpot_ms=200))
    assert found.duration_s == pytest.approx(3.0)
    assert (found.output_per_s, found.total_per_s) == (pytest.approx(2.0), pytest.approx(26 / 3))
    assert found.goodput == 0.5 and found.events_per_token == 1.0
    assert found.ttft_ms.p50 == pytest.approx(550) and found.ttft_ms.max == pytest.approx(1000)
    assert found.tpot_ms.mean == pytest.approx(300)
    assert found.itl_ms.p50 == pytest.approx(300) and found.itl_ms.p99 == pytest.approx(500)
    assert flat(found)["itl_ms_p99"] == (pytest.approx(500), "ms")


def test_gaps_within_a_stretch() -> None:
    streams = [stream(10.0, [0.1, 0.2, 0.4]), stream(20.0, [0.1, 0.9])]
    assert np.allclose(gaps_ms(streams, 10.3, 20.5), [200])
    assert np.allclose(sorted(gaps_ms(streams)), [100, 200, 800])


def test_streams_of_one_token_have_no_time_per_token() -> None:
    found = summarize([stream(0.0, [0.2])], Bounds(1000, 50))
    assert np.isnan(found.tpot_ms.p50) and found.goodput == 1.0
