"""Steps with drafts give the tokens of steps without, in every manner of sampling, eager and replayed."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from common.columns import pack_i32, unpack_i32
from common.protocol import Sampling, StepPlan
from services.worker.drafting import Drafting, Site
from services.worker.drafts import Drafts, Seen
from services.worker.graphs import GraphKey, layouts
from services.worker.proposers import ngram_drafts
from services.worker.results import StepTokens
from services.worker.state import Rows
from tests.services.worker import spelled
from tests.services.worker.called_graphs import capture
from tests.services.worker.tiny import VOCABULARY

SAMPLINGS = [
    Sampling(64, temperature=0.0),
    Sampling(64, seed=3, temperature=0.9),
    Sampling(64, seed=4, temperature=1.1, top_p=0.9, min_p=0.02),
    Sampling(64, seed=5, top_k=7, logit_bias=((5, 3.0),)),
    Sampling(64, temperature=0.0, repetition_penalty=1.4),  # has no drafts
    Sampling(64, temperature=0.3, seed=11, min_tokens=4),
    Sampling(64, temperature=1.1, seed=6, grammar=spelled.regex("[a-z]{2,5}(-[0-9]{2,}[a-z])+")),  # has no drafts
]
PROMPTS = [*([7, 9, 11, 13, 2 + i] * (1 + 2 * i) for i in range(6)), [8] * 9]
OUTPUT = 24
TOKENS = 3


def with_words(driver: Any) -> Any:
    driver.runner.held.grammars = spelled.grammars(VOCABULARY)
    return driver


def ngram(site: Site) -> Drafts:
    return ngram_drafts(site.bindings, 1, 3)


def knowing(streams: Sequence[Sequence[int]]) -> Callable[[Site], Drafts]:
    """Knows what comes; each third draft is wrong. Slot i has stream i."""

    def propose(rows: Rows, seen: Seen) -> None:
        assert rows.drafts is not None
        for slot in seen.drawn.slots[seen.drawn.offsets == 0].tolist():
            if slot < len(streams):
                length = int(rows.drafts.lengths[slot])
                ahead = [*streams[slot][length:], *[0] * TOKENS][:TOKENS]
                tokens = [(token + (place % 3 == 2)) % VOCABULARY for place, token in enumerate(ahead, length)]
                rows.tokens[slot, length : length + TOKENS] = torch.tensor(tokens, dtype=torch.int32)
                rows.drafts.drafted[slot] = TOKENS

    return lambda site: Drafts(site.bindings, propose)


class Planner:
    """Plans as if all drafts held, two plans ahead, and corrects itself by the results. Rows that are `pooled` stand
    behind the others and give a vector."""

    def __init__(self, driver: Any, chunk: int, pooled: Sequence[tuple[list[int], Sampling]] = ()) -> None:
        self.driver, self.chunk = driver, chunk
        self.prompts = prompts = [*PROMPTS, *(prompt for prompt, _ in pooled)]
        self.samplings = samplings = [*SAMPLINGS, *(sampling for _, sampling in pooled)]
        self.most = [OUTPUT] * len(PROMPTS) + [0] * len(pooled)
        size = driver.runner.rows.block_tokens
        each = -(-(max(map(len, prompts)) + OUTPUT + TOKENS) // size)
        self.added = [
            driver.start(slot, prompt, range(each * slot, each * slot + each), samplings[slot])
            for slot, prompt in enumerate(prompts)
        ]
        self.outputs: list[list[int]] = [[] for _ in prompts]
        self.scheduled = [0] * len(prompts)
        self.flights: deque[tuple[list[tuple[int, int]], list[int], list[int], StepTokens]] = deque()
        self.vectors: dict[int, bytes] = {}
        self.held = self.tried = 0
        self.mistakes: set[int] = set()  # slots of which a draft did not hold

    def run(self) -> list[list[int]]:
        while any(len(output) < most for output, most in zip(self.outputs, self.most, strict=True)):
            while len(self.flights) < 2 and self._plan():
                pass
            self._receive()
        return self.outputs[: len(PROMPTS)]

    def _plan(self) -> bool:
        drafting, filling = [], []
        for slot, prompt in enumerate(self.prompts):
            at, limit = self.scheduled[slot], len(prompt) + self.most[slot] - 1
            if at < len(prompt):
                filling.append((slot, at, min(self.chunk, len(prompt) - at)))
            elif at < limit:
                drafting.append((slot, at, 1))
        if not filling:
            drafting = [(slot, at, self._count(slot, at)) for slot, at, _ in drafting]
        work = drafting + filling
        if not work:
            return False
        samples = [at + count >= len(self.prompts[slot]) and self.most[slot] > 0 for slot, at, count in work]
        plan = StepPlan(
            next(self.driver.steps),
            added=self.added,
            slots=pack_i32(row[0] for row in work),
            positions=pack_i32(row[1] for row in work),
            counts=pack_i32(row[2] for row in work),
            samples=bytes(samples),
            drafting=len(drafting),
        )
        self.added = []
        for slot, at, count in work:
            self.scheduled[slot] = at + count
        sampled = [slot for (slot, _, _), draws in zip(filling, samples[len(drafting) :], strict=True) if draws]
        rows = [(slot, count) for slot, _, count in drafting]
        self.flights.append((rows, sampled, [slot for slot, _, _ in work], self.driver.runner.execute(plan)))
        return True

    def _count(self, slot: int, at: int) -> int:
        sampling = self.samplings[slot]
        if (
            sampling.grammar is not None
            or sampling.repetition_penalty != 1
            or len(self.outputs[slot]) < sampling.min_tokens
        ):
            return 1
        return 1 + min(TOKENS, len(self.prompts[slot]) + OUTPUT - 2 - at)

    def _receive(self) -> None:
        rows, sampled, slots, pending = self.flights.popleft()
        tokens = iter(unpack_i32(pending.tokens()))
        counts, tried = pending.counts()
        if not rows:
            assert counts == tried == b""
        given = iter(counts or b"\x01" * len(sampled))
        for (slot, count), drafts in zip(rows, tried, strict=False):
            kept = next(given)
            if kept <= drafts:
                self.mistakes.add(slot)
            self.scheduled[slot] -= count - kept
            self.outputs[slot] += [next(tokens) for _ in range(kept)]
            self.held += kept - 1
        for slot in sampled:
            assert next(given) == 1
            self.outputs[slot].append(next(tokens))
        self.tried += sum(tried)
        told = pending.logprobs()
        for row, vector in (told.vectors if told is not None else {}).items():
            assert slots[row] not in self.vectors
            self.vectors[slots[row]] = vector
        assert next(tokens, None) is None and next(given, None) is None


@pytest.fixture(scope="module")
def wanted(make_tiny: Callable[[str], Any]) -> list[list[int]]:
    outputs: list[list[int]] = with_words(make_tiny("qwen3").driver(81)).generate(PROMPTS, OUTPUT, sampling=SAMPLINGS)
    assert re.match(r"[a-z]{2,5}-[0-9]{2}", spelled.text_of(outputs[-1]))
    return outputs


@pytest.mark.parametrize("chunk", [200, 7])
@pytest.mark.parametrize("proposer", ["ngram", "knowing"])
@pytest.mark.parametrize("replayed", [False, True])
def test_the_same_tokens(
    make_tiny: Callable[[str], Any],
    wanted: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    proposer: str,
    replayed: bool,
) -> None:
    """Also where the host does not know where rows stand (`resident`), and in captured layouts."""
    whole = [prompt + output for prompt, output in zip(PROMPTS, wanted, strict=True)]
    proposes = ngram if proposer == "ngram" else knowing(whole)
    driver = with_words(make_tiny("qwen3").driver(81, drafts=Drafting(TOKENS, proposes)))
    graphs = capture(driver, layouts(32, 32, 136, 200), monkeypatch) if replayed else None
    planner = Planner(driver, chunk)
    assert planner.run() == wanted
    assert 0 < planner.held < planner.tried, "some drafts hold, others do not"
    assert graphs is None or {GraphKey(24), GraphKey(8, 128)} & set(graphs.calls)


def test_eager_steps_find_rows_where_the_host_does_not(
    make_tiny: Callable[[str], Any], wanted: list[list[int]]
) -> None:
    driver = with_words(make_tiny("qwen3").driver(81, drafts=Drafting(TOKENS, ngram)))
    driver.runner.rows.first.resident = torch.zeros(41, 25, dtype=torch.int32)
    assert Planner(driver, 9).run() == wanted
    assert driver.runner.rows.drafts.adrift.any()
