"""Kernels see their numbers and share the work; what cannot be cached is compiled all the same."""

from typing import Any

import pytest
import torch
from numba import types

from services.worker.kernels.impl.numba import _team
from services.worker.kernels.impl.numba._team import compiled, ints


def note(numbers: Any, thread: int, threads: int) -> None:
    ints(numbers[0])[thread] = types.int32((numbers[1] + thread) * 10 + threads)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_thread_runs_once(threads: int) -> None:
    seen = torch.zeros(8, dtype=torch.int32)
    _team.launch(_team.kernel(note), threads, seen.data_ptr(), 5)
    assert seen.tolist() == [(5 + thread) * 10 + threads for thread in range(threads)] + [0] * (8 - threads)


def test_without_a_cache_folder() -> None:
    def make(signature: Any, cache: bool = False, nogil: bool = False) -> Any:
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return lambda function: function

    assert compiled(make, None)(len) is len


def test_other_errors_are_not_hidden() -> None:
    def make(signature: Any, cache: bool = False) -> Any:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        compiled(make, None)(len)


def test_unavailable_without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _team.unavailable() is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert _team.unavailable() == "this CPU has no AVX2"
    monkeypatch.setattr(_team, "_OPENMP", ())
    assert "OpenMP" in str(_team.unavailable())
