import math

import pytest

from benchmarks.trace import read, short


def event(name: str, start: float, duration: float, category: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


def test_busy_time_counts_overlap_once() -> None:
    events = [
        event("a", 100, 10),
        event("b", 105, 10),  # begins before a has ended
        event("a", 120, 20),
        event("copy", 140, 60, "gpu_memcpy"),
        event("cudaGraphLaunch", 0, 500, "cuda_runtime"),
        {"ph": "M", "name": "process_name"},
    ]
    found = read(events)
    assert (found.span_us, found.busy_us, found.launches) == (100, 95, 4)
    assert found.idle == pytest.approx(0.0)  # the only gap is in the first quarter
    assert [(k.name, k.calls, k.total_us) for k in found.kernels] == [("copy", 1, 60), ("a", 2, 30), ("b", 1, 10)]


def test_gaps_are_idle() -> None:
    assert read([event("a", 0, 50), event("a", 75, 25)]).idle == pytest.approx(1 / 3)
    assert math.isnan(read([]).idle)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("paged_attention_split", "paged_attention_split"),
        ("void cutlass::Kernel2<cutlass_80_tensorop>(Params)", "Kernel2"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, 1>(int, T)",
            "vectorized_elementwise_kernel Fill",
        ),
    ],
)
def test_names_are_shortened(name: str, shown: str) -> None:
    assert short(name) == shown
