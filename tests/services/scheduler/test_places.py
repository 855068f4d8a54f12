"""What the router sees of a group."""

from common.columns import pack_i32
from common.config import Kv, Scheduler
from common.protocol import Admit, FinishReason, Load, ModelFacts, Sampling, StepResult, WorkerReady
from services.scheduler import places
from services.scheduler.core import SchedulerCore
from services.scheduler.events import SendPlan, SendTokens
from tests.services.scheduler.harness import ids


def make(blocks: int = 16, **limits: int) -> SchedulerCore:
    core = SchedulerCore(Scheduler(**limits), Kv(), seed=5)
    core.handle([WorkerReady(ModelFacts("m", "a", 100, 64, (2,), 4, blocks), 4)], 0.0)
    return core


def admit(core: SchedulerCore, seq_id: int, num_prompt: int, output: bytes = b"", max_tokens: int = 8) -> list:
    return core.handle([Admit(seq_id, pack_i32(ids(num_prompt)), Sampling(max_tokens=max_tokens), output=output)], 0.0)


def test_cached_blocks_pending_tokens_and_space() -> None:
    core = make(step_tokens=8, max_rows=2)
    admit(core, 1, 9)
    admit(core, 2, 30)
    admit(core, 3, 5)
    chain: list[bytes] = []
    prompt = pack_i32(ids(10))
    first = core.state.sequences[1].request.root
    place = places.of_tokens(core.state, prompt, 12, first, chain)
    assert place.uncached == 10 - 8 and len(chain) == 2
    assert place.open == 3 and place.short == 0
    assert place.pending == core.state.waiting.tokens + places.filling_tokens(core.state) > 5
    again = places.of_tokens(core.state, prompt, 12, first, chain)
    assert again == place and len(chain) == 2
    assert places.of_tokens(core.state, pack_i32(ids(60, 50)), 60, first, []).missing == (15 - 13) * 4
    assert places.of_tokens(core.state, prompt, 900, first, []).short == 0  # no group has more than the model


def test_a_group_of_few_blocks_is_short() -> None:
    core = make(blocks=5)
    assert places.of_tokens(core.state, pack_i32(ids(10)), 25, b"", []).short == 5


def test_the_next_one_waits_for_a_row_only_if_none_is_free() -> None:
    core = make(max_rows=1)
    admit(core, 1, 9)
    admit(core, 2, 9)
    waiting = core.state.sequences[2]
    assert places.of_next(core.state, waiting).open == 2
    assert places.of_sequence(core.state, waiting).open == 2 and places.room(core.state) == 0
    roomy = make()
    admit(roomy, 1, 9)
    assert places.room(roomy.state) == 3


def test_a_chain_is_lent_only_for_its_own_root() -> None:
    core = SchedulerCore(Scheduler(), Kv(), seed=5)
    core.handle([Admit(1, pack_i32(ids(9)), Sampling(max_tokens=3))], 0.0)
    sequence = core.state.sequences[1]
    places.lend_chain(core.state, 1, b"another", [b"digest"])
    assert sequence.chain == []
    places.lend_chain(core.state, 7, sequence.request.root, [b"digest"])
    places.lend_chain(core.state, 1, sequence.request.root, [b"digest"])
    assert sequence.chain == [b"digest"]


def test_what_has_begun_is_ended() -> None:
    core = SchedulerCore(Scheduler(), Kv(), seed=5)
    admit(core, 1, 5)
    admit(core, 2, 5, output=pack_i32([7]))
    places.end_begun(core.state, "gone")
    ((sent,)) = [effect for effect in core.handle([], 0.0) if isinstance(effect, SendTokens)]
    assert [(end.seq_id, end.reason, end.message) for end in sent.batch.finished] == [(2, FinishReason.ERROR, "gone")]
    assert list(core.state.sequences) == [1]


def test_loads_are_added_up() -> None:
    loads = [Load(running=1, steps=4, blocks_total=10), Load(running=2, waiting=3, steps=5, blocks_total=20)]
    assert places.total(loads, 100) == Load(running=3, waiting=3, steps=109, blocks_total=30)


def test_left_over_are_those_that_a_plan_passed_over() -> None:
    core = make(max_rows=1)
    effects = [*admit(core, 1, 5), *admit(core, 2, 5), *admit(core, 3, 5)]
    assert core.left_over == 0  # two plans are in flight since the first came
    plan = next(effect.plan for effect in effects if isinstance(effect, SendPlan))
    core.handle([StepResult(plan.step, pack_i32([50]))], 0.0)
    assert core.left_over == 2
