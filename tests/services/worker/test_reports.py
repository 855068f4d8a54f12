"""Log-probabilities of a step's tokens and of prompts, against transformers' log_softmax over the whole text."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from common.columns import unpack_i32
from common.logprobs import Report, record_bytes
from common.protocol import Sampling, StepPlan
from services.worker import reports
from services.worker.drafting import Drafting
from services.worker.graphs import layouts
from tests.services.worker import spelled, test_drafts
from tests.services.worker.called_graphs import capture
from tests.services.worker.test_drafts import with_words

PROMPTS = [[7, 9, 11, 13, 2 + i] * (1 + 2 * i) for i in range(8)]
SAMPLINGS = [
    Sampling(64, temperature=0.0, report=Report(3)),
    Sampling(64, seed=3, temperature=0.9, report=Report(0, 2)),
    Sampling(64, seed=4, temperature=1.1, top_p=0.9, min_p=0.02),
    Sampling(64, seed=5, top_k=7, frequency_penalty=0.6, logit_bias=((5, 3.0),), report=Report(20)),
    Sampling(64, temperature=0.0, repetition_penalty=1.4, report=Report(-1, 0)),
    Sampling(64, seed=8, temperature=0.8, report=Report(2, 1, named=(5, 100))),
    Sampling(64, seed=9, temperature=0.7, report=Report(24, named=tuple(range(40, 64)))),
    Sampling(64, seed=6, temperature=1.2, report=Report(4, 1), grammar=spelled.regex("[a-z]{2,5}(-[0-9]{2,}[a-z])+")),
]


@dataclass
class Record:
    rank: int
    ids: list[int]
    values: list[float]


def records(column: bytes, top: int) -> list[Record]:
    lines = np.frombuffer(column, np.int32).reshape(-1, record_bytes(top) // 4)
    return [
        Record(int(line[0]), line[1 : 2 + top].tolist(), line[2 + top :].view(np.float32).tolist()) for line in lines
    ]


class Listener:
    """Notes what the runner's steps report, each when the next one has been started: of the output, and of the prompt
    by place, by slot."""

    def __init__(self, runner: Any, samplings: Sequence[Sampling]) -> None:
        self.output: dict[int, list[Record]] = {}
        self.prompt: dict[int, dict[int, Record]] = {}
        self.samplings, self.silent = samplings, 0
        self._late: deque[tuple[StepPlan, Any]] = deque()
        execute = runner.execute

        def listening(plan: StepPlan) -> Any:
            pending = execute(plan)
            self.flush()
            self._late.append((plan, pending))
            return pending

        runner.execute = listening

    def flush(self) -> None:
        while self._late:
            self._hear(*self._late.popleft())

    def _hear(self, plan: StepPlan, pending: Any) -> None:
        slots = list(unpack_i32(plan.slots))
        pending.tokens()
        counts, found = iter(pending.counts()[0]), pending.logprobs()
        if found is None:
            self.silent += 1
            return
        at = 0
        for slot, samples in zip(slots, plan.samples, strict=True):
            kept = next(counts, 1) if samples else 0
            top = self.samplings[slot].report.top
            end = at + kept * record_bytes(top)
            if end > at:
                self.output.setdefault(slot, []).extend(records(found.tokens[at:end], top))
            at = end
        assert at == len(found.tokens)
        for row, (first, column) in found.prompts.items():
            mine = self.prompt.setdefault(slots[row], {})
            for place, record in enumerate(records(column, self.samplings[slots[row]].report.prompt), first):
                assert place not in mine
                mine[place] = record

    def check(self, tiny: Any, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> None:
        self.flush()
        for slot, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            report = self.samplings[slot].report
            wanted = tiny.logits([*prompt, *output]).log_softmax(-1)
            assert (slot in self.output, slot in self.prompt) == (report.top >= 0, report.prompt >= 0)
            for place, (record, token) in enumerate(zip(self.output.get(slot, ()), output, strict=False), len(prompt)):
                agree(record, token, wanted[place - 1], report.top, report.named)
            assert report.top < 0 or len(self.output[slot]) >= len(output)
            told = self.prompt.get(slot, {})
            assert sorted(told) == (list(range(1, len(prompt))) if report.prompt >= 0 else [])
            for place, record in told.items():
                agree(record, prompt[place], wanted[place - 1], report.prompt)


def agree(record: Record, token: int, wanted: torch.Tensor, top: int, named: Sequence[int] = ()) -> None:
    assert record.ids[0] == token and len(record.ids) == len(record.values) == 1 + top
    assert record.values == pytest.approx([wanted[each].item() for each in record.ids], abs=1e-3)
    best = wanted[list(named)] if named else wanted.topk(top + 1).values
    assert not named or record.ids[1:] == list(named)
    assert record.values[1:] == pytest.approx(best[:top].tolist(), abs=1e-3)
    assert abs(record.rank - 1 - int((wanted > wanted[token]).sum())) <= 1


@pytest.mark.parametrize("chunk", [200, 7])
@pytest.mark.parametrize("replayed", [False, True])
def test_every_manner_of_sampling_eager_and_replayed(
    make_tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, chunk: int, replayed: bool
) -> None:
    """Those of the logits before penalties, biases and masks; a slice of a prompt is smaller than its chunk."""
    monkeypatch.setattr(reports, "SLICE", 5)
    tiny = make_tiny("qwen3")
    plain = [msgspec.structs.replace(each, report=Report()) for each in SAMPLINGS]
    wanted = with_words(tiny.driver(65)).generate(PROMPTS, 8, sampling=plain)
    driver = with_words(tiny.driver(65))
    graphs = capture(driver, layouts(8, 8, 136, 200), monkeypatch) if replayed else None
    heard = Listener(driver.runner, SAMPLINGS)
    assert driver.generate(PROMPTS, 8, chunk, sampling=SAMPLINGS) == wanted, "reports change no token"
    heard.check(tiny, PROMPTS, wanted)
    assert graphs is None or graphs.calls, "steps that only generate are replayed"


def test_steps_without_such_rows_report_nothing(tiny: Any) -> None:
    driver = tiny.driver()
    heard = Listener(driver.runner, [Sampling(64, temperature=0.0)] * 2)
    driver.generate(PROMPTS[:2], 3)
    heard.flush()
    assert heard.silent == 4 and not heard.output


@pytest.mark.parametrize("replayed", [False, True])
def test_each_draft_that_holds_has_its_own(
    make_tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, replayed: bool
) -> None:
    wants = [Report(2), Report(0), Report(-1, 1), Report(4), Report(1), Report(), Report(3)]
    samplings = [
        msgspec.structs.replace(each, report=report) for each, report in zip(test_drafts.SAMPLINGS, wants, strict=True)
    ]
    monkeypatch.setattr(test_drafts, "SAMPLINGS", samplings)
    tiny = make_tiny("qwen3")
    wanted = with_words(tiny.driver(65)).generate(test_drafts.PROMPTS, test_drafts.OUTPUT, sampling=samplings)
    whole = [prompt + output for prompt, output in zip(test_drafts.PROMPTS, wanted, strict=True)]
    driver = with_words(tiny.driver(81, drafts=Drafting(test_drafts.TOKENS, test_drafts.knowing(whole))))
    if replayed:
        capture(driver, layouts(32, 32, 136, 200), monkeypatch)
    heard = Listener(driver.runner, samplings)
    planner = test_drafts.Planner(driver, 9)
    assert planner.run() == wanted and planner.held > 50
    heard.check(tiny, test_drafts.PROMPTS, wanted)
