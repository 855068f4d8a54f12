"""Steps with rows under a grammar: their texts match, other rows do not notice, whatever is in flight or comes back."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from common.columns import pack_i32, unpack_i32
from common.protocol import Sampling, StepPlan
from services.worker.results import StepTokens
from tests.services.worker.spelled import EOS, grammars, ids, regex, text_of

EXPRESSION = r"[a-z]{2,5}(true|false)?-[0-9]{3}"
PROMPTS = [ids(text) for text in ("one", "a longer prompt", "x", "y" * 20, "zz")]
SAMPLINGS = [
    Sampling(64, seed=1, temperature=1.3, grammar=regex(EXPRESSION)),
    Sampling(64, seed=2, temperature=0.9),
    Sampling(64, seed=3, temperature=0.0, grammar=regex(EXPRESSION)),
    Sampling(64, seed=4, temperature=1.1, top_k=9, frequency_penalty=0.5),
    Sampling(64, seed=5, temperature=1.0, top_p=0.9, repetition_penalty=1.3, min_tokens=3, grammar=regex(EXPRESSION)),
]
BOUND = (0, 2, 4)
TOKENS = 14


@pytest.fixture(scope="module")
def make_driver(make_tiny: Callable[[str], Any]) -> Callable[[], Any]:
    def make(num_blocks: int = 64) -> Any:
        driver = make_tiny("qwen3").driver(num_blocks)
        driver.runner.held.grammars = grammars(driver.runner.rows.vocab_size)
        return driver

    return make


@pytest.fixture(scope="module")
def wanted(make_driver: Callable[[], Any]) -> list[list[int]]:
    """Each row alone."""
    return [
        make_driver().generate([prompt], TOKENS, sampling=[sampling])[0]
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]


def same(found: Sequence[list[int]], wanted: Sequence[list[int]]) -> bool:
    """Up to the end of each; what comes after it means nothing."""

    def cut(tokens: list[int], place: int) -> list[int]:
        return tokens[: tokens.index(EOS) + 1] if place in BOUND and EOS in tokens else tokens

    return [cut(t, i) for i, t in enumerate(found)] == [cut(t, i) for i, t in enumerate(wanted)]


def test_texts_match(wanted: list[list[int]]) -> None:
    ended = [place for place in BOUND if EOS in wanted[place]]
    assert len(ended) >= 2
    for place in ended:
        assert re.fullmatch(EXPRESSION, text_of(wanted[place])), text_of(wanted[place])


def test_other_rows_draw_as_without_it(make_tiny: Callable[[str], Any], wanted: list[list[int]]) -> None:
    for place in (1, 3):
        plain = make_tiny("qwen3").driver().generate([PROMPTS[place]], TOKENS, sampling=[SAMPLINGS[place]])[0]
        assert wanted[place] == plain


@pytest.mark.parametrize("chunk", [200, 4])
def test_all_at_once(make_driver: Callable[[], Any], wanted: list[list[int]], chunk: int) -> None:
    assert same(make_driver().generate(PROMPTS, TOKENS, chunk, SAMPLINGS), wanted)


def plan(driver: Any, number: int, slot: int, position: int, count: int, **changes: Any) -> StepPlan:
    slots, positions, counts = (pack_i32([value]) for value in (slot, position, count))
    return StepPlan(number, slots=slots, positions=positions, counts=counts, samples=b"\1", **changes)


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("place", BOUND)
def test_two_plans_in_flight(
    make_driver: Callable[[], Any], wanted: list[list[int]], place: int, settled: bool
) -> None:
    """The next step is started before this one's tokens are read; who forgets to settle only loses time."""
    driver, prompt = make_driver(), PROMPTS[place]
    added = [driver.start(3, prompt, range(8), SAMPLINGS[place])]
    pending, output, position = [], [], 0
    for number in range(TOKENS):
        count = len(prompt) if number == 0 else 1
        pending.append(driver.runner.execute(plan(driver, number, 3, position, count, added=added)))
        added, position = [], position + count
        if len(pending) > 1:
            output += unpack_i32(pending.pop(0).tokens())
        if settled:
            pending[-1].settle()
            assert pending[-1].ready()
        else:
            assert not pending[-1].ready()
    output += unpack_i32(pending.pop().tokens())
    assert same([output if p == place else w for p, w in enumerate(wanted)], wanted)


def test_tokens_that_nobody_has_read_are_waited_for(
    make_driver: Callable[[], Any], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device that is still at work when the next step is launched."""
    monkeypatch.setattr(StepTokens, "ready", lambda self: False)
    driver, prompt = make_driver(), PROMPTS[0]
    added = [driver.start(3, prompt, range(8), SAMPLINGS[0])]
    pending = [driver.runner.execute(plan(driver, 0, 3, 0, len(prompt), added=added))]
    for number in range(1, TOKENS):
        pending.append(driver.runner.execute(plan(driver, number, 3, len(prompt) + number - 1, 1)))
    output = [token for step in pending for token in unpack_i32(step.tokens())]
    assert same([output, *wanted[1:]], wanted)


def test_penalties_count_what_was_drawn_under_the_mask(make_driver: Callable[[], Any]) -> None:
    driver = make_driver()
    added = [driver.start(slot, PROMPTS[slot], range(8 * slot, 8 * slot + 8), SAMPLINGS[slot]) for slot in (3, 4)]
    drawn: list[list[int]] = []
    places = {3: (0, 20), 4: (0, 2)}
    for _ in range(6):
        work = [(slot, position, count, True) for slot, (position, count) in places.items()]
        drawn.append(driver.step(work, added=added))
        added, places = [], {slot: (position + count, 1) for slot, (position, count) in places.items()}
    counts = driver.runner.rows.penalties.in_output
    for row, slot in enumerate((3, 4)):
        tokens = torch.tensor([step[row] for step in drawn])
        assert torch.equal(counts[slot].long(), torch.bincount(tokens, minlength=counts.shape[1]))


def test_a_preempted_row_goes_on(make_driver: Callable[[], Any], wanted: list[list[int]]) -> None:
    driver, prompt = make_driver(), PROMPTS[0]
    output = driver.step([(0, 0, 3, True)], added=[driver.start(0, prompt, range(8), SAMPLINGS[0])])
    for position in range(3, 5):
        output += driver.step([(0, position, 1, True)])
    again = driver.start(1, prompt + output, range(8, 16), SAMPLINGS[0], num_prompt=3)
    output += driver.step([(1, 0, 6, True)], removed=pack_i32([0]), added=[again])
    for position in range(6, 16):
        output += driver.step([(1, position, 1, True)])
    assert same([output, *wanted[1:]], wanted)


def test_faults_name_the_rows_of_the_step(make_driver: Callable[[], Any], wanted: list[list[int]]) -> None:
    driver = make_driver()
    bad = Sampling(64, grammar=regex("("))
    added = [driver.start(slot, [5, 6], range(8 * slot, 8 * slot + 8), how) for slot, how in ((0, GREEDY), (1, bad))]
    work = StepPlan(1, added=added, slots=pack_i32([0, 1]), positions=pack_i32([0, 0]), counts=pack_i32([2, 2]),
                    samples=b"\1\1")  # fmt: skip
    pending = driver.runner.execute(work)
    assert len(unpack_i32(pending.tokens())) == 2
    assert [fault.place for fault in pending.faults] == [1]
    assert pending.faults[0].message == "guided_regex: it cannot go on"


GREEDY = Sampling(64, temperature=0.0)


def test_reset_forgets_what_is_held(make_driver: Callable[[], Any], wanted: list[list[int]]) -> None:
    driver = make_driver()
    driver.runner.execute(plan(driver, 1, 0, 0, 3, added=[driver.start(0, PROMPTS[0], range(8), SAMPLINGS[0])]))
    driver.runner.reset()
    assert same([driver.generate([PROMPTS[0]], TOKENS, sampling=[SAMPLINGS[0]])[0], *wanted[1:]], wanted)
