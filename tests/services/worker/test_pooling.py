"""Vectors of prompts against transformers' hidden states: chunked, beside rows that decode, replayed, tried again."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from common.columns import pack_i32
from common.logprobs import Report
from common.pooling import Pooling
from common.protocol import Sampling
from services.worker.drafting import Drafting
from services.worker.graphs import layouts
from services.worker.pooling import SPAN, levels
from services.worker.shortage import Retry
from services.worker.state import Step
from tests.services.worker import test_drafts
from tests.services.worker.called_graphs import capture
from tests.services.worker.test_drafts import OUTPUT, Planner, knowing, with_words
from tests.services.worker.tiny import GREEDY

CLOSE = 1e-4
PROMPTS = [[7, 9, 11, 13, 2 + i] * (1 + 2 * i) for i in range(6)]
POOLINGS = [
    Pooling("mean"),
    Pooling("last"),
    None,  # generates
    Pooling("mean", normalize=False),
    Pooling("last", dimensions=16),
    Pooling("mean", dimensions=32),
]
SAMPLINGS = [GREEDY if each is None else Sampling(0, report=Report(pooling=each)) for each in POOLINGS]


def wanted(tiny: Any, prompt: Sequence[int], pooling: Pooling) -> torch.Tensor:
    with torch.inference_mode():
        hidden = tiny.reference.model(torch.tensor([list(prompt)])).last_hidden_state[0]
    vector = hidden[-1] if pooling.mode == "last" else hidden.mean(0)
    vector = vector[: pooling.dimensions or None]
    return torch.nn.functional.normalize(vector, dim=0) if pooling.normalize else vector


class Feeder:
    """Runs prompts in chunks; those that are not pooled go on for `more` tokens. Collects vectors by slot."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.vectors, self.outputs = driver, dict[int, list[bytes]](), dict[int, list[int]]()
        self.run = driver.runner.execute

    def __call__(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], chunk: int, more: int) -> None:
        size, first, added = self.driver.runner.rows.block_tokens, 0, []
        for slot, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            end = first - (-(len(prompt) + more) // size)
            added.append(self.driver.start(slot, prompt, range(first, end), sampling))
            first = end
        known, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
        pooled = [sampling.report.pooling is not None for sampling in samplings]
        limits = [len(prompt) + (0 if is_pooled else more) for prompt, is_pooled in zip(prompts, pooled, strict=True)]
        pending = None
        while work := [
            (slot, done[slot], min(chunk, len(tokens) - done[slot]))
            for slot, tokens in enumerate(known)
            if done[slot] < limits[slot]
        ]:
            samples = [not pooled[slot] and at + count == len(known[slot]) for slot, at, count in work]
            told = self.driver.step([(*each, flag) for each, flag in zip(work, samples, strict=True)], added=added)
            sampled, added = iter(told), []
            pending = self.newest
            for (slot, at, count), flag in zip(work, samples, strict=True):
                done[slot] = at + count
                if flag:
                    known[slot].append(next(sampled))
            found = pending.logprobs()
            for row, vector in (found.vectors if found is not None else {}).items():
                self.vectors.setdefault(work[row][0], []).append(vector)
        self.outputs = {slot: known[slot][len(prompts[slot]) :] for slot in range(len(prompts)) if not pooled[slot]}
        self.driver.step([], removed=pack_i32(range(len(prompts))))

    @property
    def newest(self) -> Any:
        return self._newest

    def listen(self) -> "Feeder":
        def execute(plan: Any) -> Any:
            self._newest = self.run(plan)
            return self._newest

        self.driver.runner.execute = execute
        return self


def check(tiny: Any, feeder: Feeder, samplings: Sequence[Sampling] = SAMPLINGS) -> None:
    pooled = {slot for slot, sampling in enumerate(samplings) if sampling.report.pooling is not None}
    assert feeder.vectors.keys() == pooled and all(len(each) == 1 for each in feeder.vectors.values())
    for slot in pooled:
        pooling = samplings[slot].report.pooling
        assert pooling is not None
        found = np.frombuffer(feeder.vectors[slot][0], np.float32)
        assert found == pytest.approx(wanted(tiny, PROMPTS[slot], pooling).numpy(), abs=CLOSE)


@pytest.mark.parametrize("chunk", [200, 7, 1])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss_64", "deepseek_v3_yarn"])
def test_equal_to_transformers_beside_a_row_that_decodes(
    make_tiny: Callable[[str], Any], name: str, chunk: int
) -> None:
    tiny = make_tiny(name)
    feeder = Feeder(tiny.driver(80)).listen()
    feeder(PROMPTS, SAMPLINGS, chunk, 9)
    check(tiny, feeder)
    assert feeder.outputs[2] == tiny.greedy(PROMPTS[2], len(feeder.outputs[2]))
    feeder.vectors.clear()
    feeder(PROMPTS, SAMPLINGS, chunk + 3, 9)  # the slots' next rows do not go on with earlier sums
    check(tiny, feeder)


def test_the_last_token_costs_no_replay(make_tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = make_tiny("qwen3")
    driver = tiny.driver(80)
    graphs = capture(driver, layouts(8, 8, 136, 200), monkeypatch)
    eager, eager_steps = driver.runner._run_eagerly, list[Any]()

    def run_eagerly(*given: Any) -> Any:
        eager_steps.append(given)
        return eager(*given)

    monkeypatch.setattr(driver.runner, "_run_eagerly", run_eagerly)
    last = [GREEDY if each is GREEDY else Sampling(0, report=Report(pooling=Pooling())) for each in SAMPLINGS[:4]]
    feeder = Feeder(driver).listen()
    feeder(PROMPTS[:4], last, 12, 9)
    check(tiny, feeder, last)
    assert graphs.calls and not eager_steps
    feeder.vectors.clear()
    feeder(PROMPTS[:4], SAMPLINGS[:4], 12, 9)
    check(tiny, feeder, SAMPLINGS[:4])
    assert len(eager_steps) == 3, "of those that compute a mean"


def test_a_step_that_failed_leaves_sums_as_they_were(
    make_tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of more than one chunk's length has too little memory after its sums were made: it runs in pieces."""
    tiny = make_tiny("qwen3")
    driver = tiny.driver(80)
    runner, failures = driver.runner, 0
    pooler = runner._results.reporter.pooler
    pool = pooler.pool

    def short(parts: Any, hidden: torch.Tensor, normed: Any) -> None:
        nonlocal failures
        pool(parts, hidden, normed)
        if len(hidden) > 20:
            failures += 1
            raise RuntimeError("out of memory")

    monkeypatch.setattr(pooler, "pool", short)

    def run(step: Step) -> Any:
        try:
            return type(runner).run(runner, step)
        except RuntimeError:
            return Retry(lambda piece: type(runner).run(runner, piece), lambda: None, runner.rows.give_up)(step)

    monkeypatch.setattr(runner, "run", run)
    feeder = Feeder(driver).listen()
    feeder(PROMPTS, SAMPLINGS, 40, 3)
    check(tiny, feeder)
    assert failures > 2


@pytest.mark.parametrize(("replayed", "reads", "chunk"), [(False, False, 7), (True, False, 200), (True, True, 7)])
def test_beside_rows_with_drafts(
    make_tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, replayed: bool, reads: bool, chunk: int
) -> None:
    """Steps have more entries than rows then; and a proposer that reads hidden states has those of all tokens kept."""
    tiny = make_tiny("qwen3")
    tokens = with_words(tiny.driver(133)).generate(test_drafts.PROMPTS, OUTPUT, sampling=test_drafts.SAMPLINGS)
    streams = [prompt + output for prompt, output in zip(test_drafts.PROMPTS, tokens, strict=True)]
    driver = with_words(tiny.driver(133, drafts=Drafting(test_drafts.TOKENS, knowing(streams))))
    driver.runner._drafts.reads = reads
    graphs = capture(driver, layouts(32, 32, 136, 200), monkeypatch) if replayed else None
    pooled = [(PROMPTS[slot], SAMPLINGS[slot]) for slot, pooling in enumerate(POOLINGS) if pooling is not None]
    planner = Planner(driver, chunk, pooled)
    assert planner.run() == tokens and 0 < planner.held < planner.tried
    assert graphs is None or graphs.calls
    assert sorted(planner.vectors) == [len(tokens) + row for row in range(len(pooled))]
    for (prompt, sampling), (_, vector) in zip(pooled, sorted(planner.vectors.items()), strict=True):
        assert sampling.report.pooling is not None
        expected = wanted(tiny, prompt, sampling.report.pooling).numpy()
        assert np.frombuffer(vector, np.float32) == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("lengths", [[1, 1], [1, 5, 64, 2], [65, 1, 64 * 64 + 1, 130]])
def test_long_sums_are_made_of_short_ones(lengths: list[int]) -> None:
    values = torch.rand(sum(lengths), 3)
    found, depth = values, 0
    for sizes in levels(lengths):
        assert sizes.max() <= SPAN and sizes.sum() == len(found)
        found, depth = torch.segment_reduce(found, "sum", lengths=torch.from_numpy(sizes), axis=0), depth + 1
    assert torch.allclose(found, torch.stack([part.sum(0) for part in values.split(lengths)]))
    assert depth == (0 if max(lengths) == 1 else 1 if max(lengths) <= SPAN else 3)


def test_a_row_that_overflows_is_alone(make_tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = make_tiny("qwen3")
    hidden = tiny.decoder.hidden

    def broken(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = hidden(x)
        found[3] = float("nan")  # a token of the first prompt
        return found

    monkeypatch.setattr(tiny.decoder, "hidden", broken)
    feeder = Feeder(tiny.driver(80)).listen()
    feeder(PROMPTS, [Sampling(0, report=Report(pooling=Pooling("mean")))] * len(PROMPTS), 200, 0)
    finite = [bool(np.isfinite(np.frombuffer(feeder.vectors[slot][0], np.float32)).all()) for slot in range(6)]
    assert finite == [False] + [True] * 5


def test_many_rows_are_one_product(make_tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither norms nor copies to the host are made row by row."""
    tiny = make_tiny("qwen3")
    driver, calls = tiny.driver(80), 0
    hidden = tiny.decoder.hidden

    def counted(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        found: torch.Tensor = hidden(x)
        return found

    monkeypatch.setattr(tiny.decoder, "hidden", counted)
    feeder = Feeder(driver).listen()
    samplings = [Sampling(0, report=Report(pooling=Pooling("mean")))] * len(PROMPTS)
    feeder(PROMPTS, samplings, 200, 0)
    check(tiny, feeder, samplings)
    assert calls == 1
