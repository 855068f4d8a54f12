"""The real scheduler core and a tiny model: with drafts every request says what it says without.

Few blocks, so that rows are preempted; equal beginnings, so that prefixes are found; choices that share a prompt;
a worker that is lost; two plans in flight.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from common.columns import pack_i32, unpack_i32, unpack_u64
from common.config import Kv, Scheduler, Speculative
from common.protocol import Admit, FinishReason, ModelFacts, Sampling, StepPlan, WorkerReady
from services.scheduler.core import SchedulerCore
from services.scheduler.events import SendPlan, SendTokens, WorkerLost
from services.worker.drafting import Drafting, choose_drafting
from services.worker.engine import Pending, result_of
from services.worker.memory import Shape
from services.worker.shortage import Outcome
from tests.services.worker import spelled
from tests.services.worker.mtp_checkpoint import make_mtp
from tests.services.worker.tiny import Tiny

BLOCK_TOKENS, ROWS, MAX_LEN = 8, 6, 200
FACTS = ModelFacts("tiny", "tiny", 131, MAX_LEN, (2, 41), BLOCK_TOKENS, 26)
Said = dict[int, tuple[list[int], FinishReason]]
Figures = dict[str, float]
Execute = Callable[[StepPlan], Pending]


def admits() -> list[Admit]:
    source = random.Random(4)
    common = [source.randrange(3, 131) for _ in range(20)] * 2
    asked = []
    for number in range(12):
        prompt = common[: source.choice((0, 17, 40))] + [source.randrange(3, 131) for _ in range(1 + number % 7)]
        sampling = Sampling(
            max_tokens=source.choice((1, 2, 20, 45)),
            seed=number,
            temperature=source.choice((0.0, 0.0, 0.4, 1.0)),
            top_p=source.choice((1.0, 0.8)),
            top_k=source.choice((0, 20)),
            repetition_penalty=source.choice((1.0, 1.0, 1.0, 1.2)),
            min_tokens=source.choice((0, 0, 6)),
            ignore_eos=number % 3 == 0,
            stop_token_ids=(7, 122) if number % 4 == 1 else (),
            logit_bias=((17, 2.0),) if number % 5 == 2 else (),
        )
        asked.append(Admit(10 * number, pack_i32(prompt), sampling, n=1 + number % 2))
    for number, expression in enumerate(("[a-z]{3,9}-[0-9]{4,}", "([a-z]{2}[0-9])+"), 12):
        limits = Sampling(30, seed=number, temperature=1.0, grammar=spelled.regex(expression))
        asked.append(Admit(10 * number, pack_i32([*common[:17], number]), limits, n=2))
    return asked


def say(start: Callable[[], Execute], facts: ModelFacts, asked: list[Admit], lost_at: int = -1) -> tuple[Said, Figures]:
    """Runs all requests to their ends; the worker is replaced when the step `lost_at` is due."""
    core = SchedulerCore(Scheduler(max_rows=ROWS, step_tokens=48), Kv(), seed=3)
    execute = start()
    tokens_of: dict[int, list[int]] = {}
    said: Said = {}
    flights: deque[tuple[int, Pending]] = deque()
    events: list[Any] = [WorkerReady(facts, ROWS), *asked]
    for step in range(5000):
        for effect in core.handle(events, step / 100):
            if isinstance(effect, SendPlan):
                flights.append((effect.plan.step, execute(effect.plan)))
            elif isinstance(effect, SendTokens):
                rows = effect.batch.seq_ids, effect.batch.first_index, effect.batch.tokens
                columns = unpack_u64(rows[0]), unpack_i32(rows[1]), unpack_i32(rows[2])
                for seq_id, index, token in zip(*columns, strict=True):
                    assert index == len(tokens_of.setdefault(seq_id, []))
                    tokens_of[seq_id].append(token)
                for finished in effect.batch.finished:
                    said[finished.seq_id] = tokens_of[finished.seq_id], finished.reason
        core.check()
        if not flights:
            break
        number, pending = flights.popleft()
        events = [result_of(number, pending)]
        if step == lost_at:
            flights.clear()
            execute = start()
            events = [WorkerLost("killed"), WorkerReady(facts, ROWS)]
    assert core.idle and len(said) == sum(admit.n for admit in asked)
    return said, core.metrics()


def say_by(tiny: Tiny, drafting: Drafting | None, tokens: int, lost_at: int = -1) -> tuple[Said, Figures]:
    def start() -> Execute:
        runner = tiny.driver(FACTS.num_blocks + 1, ROWS, BLOCK_TOKENS, drafting).runner
        runner.held.grammars = spelled.grammars(FACTS.vocab_size)
        return lambda plan: Outcome(runner.execute(plan))

    return say(start, msgspec.structs.replace(FACTS, drafts=tokens, draft_rows=ROWS), admits(), lost_at)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """GLM's mixture, which has a head for multi-token prediction."""
    return make_mtp(tmp_path_factory.mktemp("mtp")).tiny()


@pytest.fixture(scope="module")
def wanted(tiny: Tiny) -> Said:
    return say_by(tiny, None, 0)[0]


@pytest.mark.parametrize(("method", "tokens"), [("ngram", 4), ("ngram", 8), ("mtp", 1), ("mtp", 3)])
def test_the_same_is_said(tiny: Tiny, wanted: Said, method: Any, tokens: int) -> None:
    settings = Speculative(method=method, tokens=tokens, ngram_min=1)
    drafting = choose_drafting(settings, tiny.decoder, Shape(ROWS, MAX_LEN, BLOCK_TOKENS), no_model)
    said, figures = say_by(tiny, drafting, tokens)
    assert said == wanted
    names = ("drafts", "draft_tokens", "cached_tokens", "preemptions", *(["accepted_tokens"] * (method == "ngram")))
    met = {name: figures[name] for name in names}
    assert all(met.values()), met
    assert {reason for _, reason in wanted.values()} >= {FinishReason.EOS, FinishReason.LENGTH}


def test_the_same_is_said_when_the_worker_is_lost(tiny: Tiny, wanted: Said) -> None:
    drafting = choose_drafting(
        Speculative(method="ngram", ngram_min=1), tiny.decoder, Shape(ROWS, MAX_LEN, BLOCK_TOKENS), no_model
    )
    assert say_by(tiny, drafting, 4, lost_at=20)[0] == wanted


def no_model(name: str) -> Any:
    raise AssertionError("no draft model is asked for")
