"""What is decided without a device; capture itself is tested where there is one."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from common.protocol import Sampling
from services.worker import graphs
from services.worker.graphs import Captured, DecodeInputs, GraphKey, Graphs, choose, sizes
from services.worker.staging import offsets
from services.worker.state import Step

ON_GPU = torch.cuda.is_available()


def make_step(counts: Sequence[int], samples: Sequence[bool] | None = None) -> Step:
    rows = np.arange(len(counts))
    return Step(rows, rows * 0, np.array(counts, np.int64), np.array(samples or [True] * len(counts), np.bool_))


def test_sizes_are_close_where_padding_is_dear() -> None:
    assert sizes(256, 0) == ()
    assert sizes(1, 512) == (1,) and sizes(3, 512) == (1, 2, 3) and sizes(8, 512) == (1, 2, 4, 8)
    assert sizes(512, 512)[-3:] == (480, 496, 512) and len(sizes(512, 512)) == 51
    assert sizes(1000, 20) == (1, 2, 4, 8, 16, 20)


@pytest.mark.parametrize("rows", range(1, 513, 7))
def test_padding_is_bounded(rows: int) -> None:
    key = choose(make_step([1] * rows), sizes(512, 512))
    assert key is not None and rows <= key.size <= max(rows + 15, 2)


def test_only_steps_of_sampled_single_tokens_are_replayed() -> None:
    captured = sizes(8, 8)
    assert choose(make_step([1] * 5), captured) == GraphKey(8)
    assert choose(make_step([1] * 9), captured) is None
    assert choose(make_step([]), captured) is None
    assert choose(make_step([1]), ()) is None
    assert choose(make_step([1, 2]), captured) is None
    assert choose(make_step([1, 1], [True, False]), captured) is None


def test_inputs_lie_where_they_are_staged() -> None:
    size = 5
    columns = DecodeInputs.blank(size)
    generator = np.random.default_rng(0)
    columns = tuple((generator.random(c.shape) * 100).astype(c.dtype) for c in columns)
    starts, end = offsets(columns)
    place = torch.zeros(end, dtype=torch.uint8)
    for start, column in zip(starts, columns, strict=True):
        place[start : start + column.nbytes] = torch.from_numpy(column.reshape(-1).view(np.uint8))
    for tensor, column in zip(DecodeInputs.at(place, size), columns, strict=True):
        assert tensor.shape == column.shape and np.array_equal(tensor.numpy(), column)


class CalledGraphs(Graphs):
    """Calls the step where a device would replay it."""

    def _capture(self, size: int, columns: Sequence[Any], decode: graphs.Decode) -> Captured:
        self.calls: list[int] = []
        given = DecodeInputs.at(self._place, size)

        class Call:
            def replay(_) -> None:
                self.calls.append(size)
                logits.copy_(decode(given))

        for target, column in zip(given, columns, strict=True):
            target.copy_(torch.from_numpy(column))
        logits = decode(given)
        return Captured(Call(), self._place[: offsets(columns)[1]], logits)  # type: ignore[arg-type]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[CalledGraphs]:
    made: list[CalledGraphs] = []

    def make(device: torch.device, largest: int) -> CalledGraphs:
        made.append(CalledGraphs(device, largest))
        return made[-1]

    monkeypatch.setattr("services.worker.runner.Graphs", make)
    return made


SAMPLINGS = [
    Sampling(64, temperature=0.0),
    Sampling(64, seed=3, temperature=0.9),
    Sampling(64, seed=4, temperature=1.1, top_p=0.9, min_p=0.02),
    Sampling(64, seed=5, top_k=7, frequency_penalty=0.6),
    Sampling(64, temperature=0.0, repetition_penalty=1.4),
]


def test_replayed_steps_give_the_same_tokens(make_tiny: Callable[[str], Any], captured: list[CalledGraphs]) -> None:
    tiny = make_tiny("qwen3")
    prompts = [[7, 9, 11, 13, 2 + i] * (1 + i) for i in range(5)]
    wanted = tiny.driver().generate(prompts, 14, sampling=SAMPLINGS)
    driver = tiny.driver(65)
    driver.runner.rows.resident = torch.zeros(41, 25, dtype=torch.int32)
    reports: list[tuple[int, int]] = []
    driver.runner.capture(8, lambda done, total: reports.append((done, total)))
    assert driver.runner.cache.storage[:, :, :-1].count_nonzero() == 0, "only the last block is written"
    assert reports == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert driver.generate(prompts, 14, sampling=SAMPLINGS) == wanted
    assert captured[0].calls == [8] * 13
