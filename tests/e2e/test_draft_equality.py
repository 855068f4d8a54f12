"""The real scheduler core and a tiny model: with drafts every request says what it says without.

Few blocks, so that rows are preempted; equal beginnings, so that prefixes are found; choices that share a prompt;
a worker that is lost; two plans in flight.
"""

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from common.columns import pack_i32, unpack_i32, unpack_u64
from common.config import Kv, Scheduler, Speculative
from common.kv_needs import needs
from common.protocol import Admit, FinishReason, ModelFacts, Sampling, StepPlan, WorkerReady
from services.scheduler.core import SchedulerCore
from services.scheduler.events import SendPlan, SendTokens, WorkerLost
from services.worker.draft_state import DraftState
from services.worker.drafting import Drafting, Site, choose_drafting
from services.worker.drafts import Drafts, Seen
from services.worker.engine import Pending, result_of
from services.worker.graphs import layouts
from services.worker.kernels.registry import Facts, bind
from services.worker.layers.decoder import Decoder
from services.worker.layers.kv_cache import GroupedCache
from services.worker.layers.rope import RopeTable
from services.worker.memory import Shape
from services.worker.runner import Runner
from services.worker.shortage import Outcome
from services.worker.state import Rows
from tests.services.worker import spelled
from tests.services.worker.called_graphs import CalledGraphs, capture
from tests.services.worker.mtp_checkpoint import make_mtp
from tests.services.worker.tiny import FLOAT, Tiny, load_decoder, make_tiny

BLOCK_TOKENS, ROWS, MAX_LEN, TOKENS = 8, 6, 200, 3
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


def say_in_groups(
    decoder: Decoder,
    drafting: Drafting | None,
    tokens: int,
    prepare: Callable[[Runner], object] = lambda runner: None,
    lost_at: int = -1,
) -> tuple[Said, Figures]:
    """In the layout that the model has in production, little of which fits: windows, states with checkpoints."""
    layout, cpu = decoder.layout(BLOCK_TOKENS, FLOAT, every=2 * BLOCK_TOKENS), torch.device("cpu")
    shape, bindings = Shape(ROWS, MAX_LEN, BLOCK_TOKENS), bind(("torch",), Facts("cpu"))
    states = {group.pool for group in layout.groups if group.kind == "state"}
    least = needs(layout.groups, len(layout.pools), MAX_LEN, BLOCK_TOKENS)
    pools = [ROWS + 3 if pool in states else (2 * blocks if pool else blocks + 2) for pool, blocks in enumerate(least)]

    def start() -> Execute:
        state = DraftState(ROWS, tokens, cpu) if drafting is not None else None
        rows = Rows(shape, decoder.spec.vocab_size, FACTS.eos_token_ids, cpu, layout.groups, state)
        cache = GroupedCache(layout, [blocks + 1 for blocks in pools], BLOCK_TOKENS, FLOAT, cpu)
        rope = RopeTable(decoder.spec.ropes, MAX_LEN, decoder.final_norm.weight)
        drafts = drafting.make(Site(decoder, cache, rope, bindings)) if drafting is not None else None
        runner = Runner(decoder, rows, cache, rope, bindings, drafts)
        prepare(runner)
        return lambda plan: Outcome(runner.execute(plan))

    groups = {"groups": layout.groups, "num_blocks": pools[0], "pools": tuple(pools[1:])}
    facts = msgspec.structs.replace(FACTS, drafts=tokens, draft_rows=ROWS, **groups)
    return say(start, facts, long_admits(), lost_at)


def long_admits(max_tokens: int = 44) -> list[Admit]:
    """Few, so that rows draft, and so long that they take each other's blocks."""
    longer = {"max_tokens": max_tokens, "ignore_eos": True, "stop_token_ids": ()}
    replace = msgspec.structs.replace
    return [replace(admit, sampling=replace(admit.sampling, **longer)) for admit in admits()[:4]]


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


@pytest.mark.parametrize(
    ("method", "tokens"), [("ngram", 4), pytest.param("ngram", 8, marks=pytest.mark.long), ("mtp", 1), ("mtp", 3)]
)
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


def knowing(said: Said) -> Callable[[Site], Drafts]:
    """Proposes what will be said; each third token is another one."""
    asked = {admit.seq_id + choice: unpack_i32(admit.tokens) for admit in long_admits() for choice in range(admit.n)}
    streams = [[*asked[seq_id], *tokens] for seq_id, (tokens, _) in said.items()]

    def propose(rows: Rows, seen: Seen) -> None:
        assert rows.drafts is not None
        for slot in seen.drawn.slots[seen.drawn.offsets == 0].tolist():
            length = int(rows.drafts.lengths[slot])
            known = rows.tokens[slot, :length].tolist()
            ahead = next((stream[length : length + TOKENS] for stream in streams if stream[:length] == known), [])
            if drafts := [token if place % 3 else (token + 1) % 131 for place, token in enumerate(ahead, length)]:
                rows.tokens[slot, length : length + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
            rows.drafts.drafted[slot] = len(drafts)

    return lambda site: Drafts(site.bindings, propose)


@pytest.mark.parametrize(
    "architecture", ["GptOss", pytest.param("Gemma3", marks=pytest.mark.long), "MiMoV2Flash", "Qwen3Next"]
)
def test_the_same_is_said_by_layers_with_windows_and_states(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that do not hold reach behind what windows have given back, and change no state nor checkpoint of it.

    Also replayed, and when the worker is lost.
    """
    made = make_tiny(f"{architecture}ForCausalLM", tmp_path)
    wanted, _ = say_in_groups(made.decoder, None, 0)
    decoder = load_decoder(made.folder, speculative=Speculative(method="ngram", tokens=TOKENS))
    drafting = Drafting(TOKENS, knowing(wanted))
    said, figures = say_in_groups(decoder, drafting, TOKENS)
    assert said == wanted
    met = {
        name: figures[name] for name in ("drafts", "draft_tokens", "accepted_tokens", "cached_tokens", "preemptions")
    }
    assert all(met.values()) and figures["accepted_tokens"] < figures["draft_tokens"], met
    entries = ROWS * (1 + TOKENS)
    keys = [key for key in layouts(entries, entries, 136, MAX_LEN) if key.decode % 8 == 0]

    def replayed(runner: Runner) -> CalledGraphs:
        return capture(SimpleNamespace(runner=runner), keys, monkeypatch)

    assert say_in_groups(decoder, drafting, TOKENS, replayed, lost_at=25)[0] == wanted


@pytest.mark.parametrize("architecture", ["DeepseekV32", "MiMoV2Flash", "Qwen3Next"])
def test_the_same_is_said_with_a_models_own_head(tmp_path: Path, architecture: str) -> None:
    """Its keys and values lie in the group of its kind."""
    decoder = make_mtp(tmp_path, f"{architecture}ForCausalLM").tiny().decoder
    wanted, _ = say_in_groups(decoder, None, 0)
    settings = Speculative(method="mtp", tokens=TOKENS)
    drafting = choose_drafting(settings, decoder, Shape(ROWS, MAX_LEN, BLOCK_TOKENS), no_model)
    said, figures = say_in_groups(decoder, drafting, TOKENS)
    assert said == wanted
    assert figures["drafts"] > 5 and figures["preemptions"] and figures["cached_tokens"]


def no_model(name: str) -> Any:
    raise AssertionError("no draft model is asked for")
