"""What is decided without a device; capture itself is tested where there is one."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from common.columns import pack_i32
from common.config import Scheduler
from common.protocol import Sampling
from services.worker import graphs
from services.worker.graphs import (
    GraphKey,
    StepColumns,
    StepInputs,
    Tables,
    choose,
    decode_sizes,
    layouts,
)
from services.worker.staging import offsets
from services.worker.state import Step
from tests.services.worker import spelled
from tests.services.worker.called_graphs import CalledGraphs
from tests.services.worker.served import SHAPE, Served


def make_step(counts: Sequence[int], samples: Sequence[bool] | None = None) -> Step:
    rows = np.arange(len(counts))
    return Step(rows, rows * 0, np.array(counts, np.int64), np.array(samples or [True] * len(counts), np.bool_))


def test_sizes_are_close_where_padding_is_dear() -> None:
    assert decode_sizes(256, 0) == ()
    assert decode_sizes(1, 512) == (1,) and decode_sizes(3, 512) == (1, 2, 3) and decode_sizes(8, 512) == (1, 2, 4, 8)
    assert decode_sizes(512, 512)[-3:] == (480, 496, 512) and len(decode_sizes(512, 512)) == 51
    assert decode_sizes(1000, 20) == (1, 2, 4, 8, 16, 20)


def test_layouts_keep_to_what_a_step_can_be() -> None:
    assert layouts(256, 0, 2048, 4096) == ()
    keys = layouts(64, 512, 300, 4096)
    assert {key.chunk for key in keys} == {0, 128, 256}
    assert max(key.decode for key in keys) == 64 and GraphKey(0, 256) in keys
    assert {key.chunk for key in layouts(64, 512, 2048, 200)} == {0, 128}, "padding is one row of the padding"
    assert all(key.chunk_rows > 1 for key in keys if key.chunk)


@pytest.mark.parametrize("rows", range(1, 513, 7))
def test_padding_is_bounded(rows: int) -> None:
    choice = choose(make_step([1] * rows), layouts(512, 512, 2048, 4096))
    assert choice is not None and rows <= choice.key.decode <= max(rows + 15, 2) and choice.key.chunk == 0


def test_which_steps_are_replayed() -> None:
    captured = layouts(8, 8, 256, 4096)
    choice = choose(make_step([1] * 5), captured)
    assert choice is not None and choice.key == GraphKey(8)
    assert choose(make_step([1] * 9), captured) is None
    assert choose(make_step([]), captured) is None
    assert choose(make_step([1]), ()) is None
    mixed = choose(make_step([1, 100, 1, 30, 1], [True, False, True, True, False]), captured)
    assert mixed is not None and mixed.key == GraphKey(8, 256), "100 + 30 + 1 tokens beside two rows that decode"
    assert mixed.decode.tolist() == [0, 2] and mixed.chunks.tolist() == [1, 3, 4]
    assert choose(make_step([257]), captured) is None
    assert choose(make_step([2] * 4 + [1] * 4), captured) is not None
    wide = choose(make_step([2] * 5), captured)
    assert wide is not None and wide.key == GraphKey(0, 256), "128 tokens have four rows, and one for padding"
    far = make_step([64])._replace(positions=np.array([graphs.LONG_CONTEXT]))
    assert choose(far, captured) is None


def test_chunks_far_in_a_prompt_have_layouts_of_their_own() -> None:
    captured = layouts(8, 8, 256, graphs.LONG_CONTEXT + 1)
    beside = Step(np.arange(2), np.array([9, graphs.LONG_CONTEXT]), np.array([1, 200]), np.array([True, False]))
    assert choose(beside, captured)[0] == GraphKey(8, 256, long=True)  # type: ignore[index]
    assert choose(beside._replace(positions=np.array([9, 9])), captured)[0] == GraphKey(8, 256)  # type: ignore[index]
    assert choose(beside._replace(counts=np.array([1, 1])), captured)[0].long  # type: ignore[index]
    far = beside._replace(counts=np.array([1, 1]), samples=np.array([True, True]))
    assert choose(make_step([5] * 4)._replace(positions=beside.positions[[1, 0, 0, 0]]), captured)[0].long  # type: ignore[index]
    assert choose(make_step([5] * 5)._replace(positions=beside.positions[[1, 0, 0, 0, 0]]), captured) is None
    assert choose(far, captured)[0] == GraphKey(2), "rows that decode may have any context"  # type: ignore[index]


@pytest.mark.parametrize("key", [GraphKey(5), GraphKey(3, 128), GraphKey(0, 256)])
def test_inputs_lie_where_they_are_staged(key: GraphKey) -> None:
    generator = np.random.default_rng(0)
    columns = StepColumns(*((generator.random(c.shape) * 100).astype(c.dtype) for c in StepColumns.blank(key)))
    starts, end = offsets(columns)
    place = torch.zeros(end, dtype=torch.uint8)
    for start, column in zip(starts, columns, strict=True):
        place[start : start + column.nbytes] = torch.from_numpy(column.reshape(-1).view(np.uint8))
    for tensor, column in zip(StepInputs.at(place, key), columns, strict=True):
        assert tensor.shape == column.shape and np.array_equal(tensor.numpy(), column)


def test_an_alias_shares_memory() -> None:
    owner = torch.arange(24, dtype=torch.bfloat16).view(4, 6)
    part = graphs.alias(owner[1:, ::2])
    assert part.dtype == owner.dtype and part.tolist() == owner[1:, ::2].tolist()
    owner[2, 2] = 99
    assert part[1, 1] == 99 and part.data_ptr() == owner[1:, ::2].data_ptr()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[CalledGraphs]:
    made: list[CalledGraphs] = []

    def make(device: torch.device, wanted: Sequence[GraphKey], tables: Tables) -> CalledGraphs:
        made.append(CalledGraphs(device, wanted, tables))
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


@pytest.mark.parametrize("chunk", [200, 7])
def test_replayed_steps_give_the_same_tokens(
    make_tiny: Callable[[str], Any], captured: list[CalledGraphs], chunk: int
) -> None:
    """Prompts in chunks beside rows that decode, in every manner of sampling; capture writes nothing but padding."""
    tiny = make_tiny("qwen3")
    prompts = [[7, 9, 11, 13, 2 + i] * (1 + 2 * i) for i in range(5)]
    wanted = tiny.driver().generate(prompts, 14, sampling=SAMPLINGS)
    driver = tiny.driver(65)
    driver.runner.rows.first.resident = torch.zeros(41, 25, dtype=torch.int32)
    reports: list[tuple[int, int]] = []
    keys = layouts(8, 8, 136, 200)
    driver.runner.capture(keys, lambda done, total: reports.append((done, total)))
    assert driver.runner.cache.storage[:, :, :-1].count_nonzero() == 0, "only the last block is written"
    assert reports == [(done, len(keys)) for done in range(len(keys))]
    assert driver.generate(prompts, 14, chunk, sampling=SAMPLINGS) == wanted
    calls = captured[0].calls
    assert GraphKey(8) in calls and (chunk == 200 or GraphKey(8, 128) in calls)


def test_a_graph_brings_every_groups_tables_up_to_date(
    make_tiny: Callable[[str], Any], captured: list[CalledGraphs]
) -> None:
    """Windows in a pool that is too small for all their pages; what is replayed reads tables of the device only."""
    decoder, limits = make_tiny("GptOssForCausalLM").decoder, Scheduler(max_rows=8, step_tokens=136)
    prompts = [[7, 9, 11, 13, 2 + i] * (1 + 3 * i) for i in range(5)]
    wanted = Served(decoder, [200], limits).generate(prompts, 14)
    served = Served(decoder, [24], limits)
    rows, shape = served.runner.rows, (SHAPE.max_rows + 1, SHAPE.max_len // SHAPE.block_tokens)
    for each in (rows.first, *rows.beside):
        each.resident = torch.zeros(shape, dtype=torch.int32)
    served.runner.capture(layouts(8, 8, 136, 200), lambda done, total: None)
    assert served.generate(prompts, 14) == wanted
    assert {key.chunk for key in captured[0].calls} == {0, 128} and len(rows.beside) == 2


def test_rows_under_a_grammar_are_drawn_from_its_logits(
    make_tiny: Callable[[str], Any], captured: list[CalledGraphs]
) -> None:
    tiny, expression = make_tiny("qwen3"), spelled.regex("[a-z]{2,6}-[0-9]+")
    bound = [Sampling(64, seed=8, grammar=expression), Sampling(64, temperature=0.0, grammar=expression)]
    samplings = [bound[0], SAMPLINGS[1], bound[1], SAMPLINGS[3], bound[0]]
    prompts = [[7, 9, 11, 13, 4 + i] * (1 + 2 * i) for i in range(5)]
    outputs = []
    for replays in (False, True):
        driver = tiny.driver(65)
        driver.runner.held.grammars = spelled.grammars(driver.runner.rows.vocab_size)
        if replays:
            driver.runner.rows.first.resident = torch.zeros(41, 25, dtype=torch.int32)
            driver.runner.capture(layouts(8, 8, 136, 200), lambda done, total: None)
        outputs.append(driver.generate(prompts, 8, 7 if replays else 200, sampling=samplings))
    assert outputs[0] == outputs[1] and captured[0].calls
    assert re.match("[a-z]{2}", spelled.text_of(outputs[1][0]))


def test_rows_in_any_order(make_tiny: Callable[[str], Any], captured: list[CalledGraphs]) -> None:
    """A plan may name rows that decode behind chunks; results come in its order."""
    tiny = make_tiny("qwen3")
    prompts = [[5, 6, 7], [8] * 20, [9, 4] * 6]
    wanted = tiny.driver().generate(prompts, 3)
    driver = tiny.driver(65)
    driver.runner.rows.first.resident = torch.zeros(41, 25, dtype=torch.int32)
    driver.runner.capture(layouts(8, 8, 136, 200), lambda done, total: None)
    added = [driver.start(slot, prompt, range(8 * slot, 8 * slot + 8)) for slot, prompt in enumerate(prompts)]
    first = driver.step([(0, 0, 3, True), (2, 0, 12, True)], added=added)
    second = driver.step([(1, 0, 11, False), (2, 12, 1, True), (0, 3, 1, True)])
    third = driver.step([(2, 13, 1, True), (1, 11, 9, True), (0, 4, 1, True)])
    assert [[first[0], second[1], third[2]], [third[1]], [first[1], second[0], third[0]]] == [
        wanted[0],
        wanted[1][:1],
        wanted[2],
    ]
    assert {key.chunk for key in captured[0].calls} == {128}


def test_a_row_that_takes_anothers_place_is_itself(
    make_tiny: Callable[[str], Any], captured: list[CalledGraphs]
) -> None:
    """The plans' columns are the same, but for what has come and gone: nothing stays of the row before."""
    tiny = make_tiny("qwen3")
    greedy, drawing = [5, 6, 7, 8], [9, 4, 11, 3]
    sampling = Sampling(64, seed=3, temperature=0.9)
    wanted = tiny.driver().generate([greedy, drawing], 4, sampling=[SAMPLINGS[0], sampling])
    driver = tiny.driver(65)
    driver.runner.rows.first.resident = torch.zeros(41, 25, dtype=torch.int32)
    driver.runner.capture(layouts(8, 8, 136, 200), lambda done, total: None)
    first = driver.step([(0, 0, 4, True)], added=[driver.start(0, greedy, [3])])
    first += [driver.step([(0, position, 1, True)])[0] for position in range(4, 7)]
    driver.step([(1, 0, 3, False)], added=[driver.start(1, drawing, [5])])
    again = driver.start(0, drawing, [5], sampling, computed=3)
    second = driver.step([(0, 3, 1, True)], removed=pack_i32([0, 1]), added=[again])
    second += [driver.step([(0, position, 1, True)])[0] for position in range(4, 7)]
    assert [first, second] == wanted and GraphKey(1) in captured[0].calls
