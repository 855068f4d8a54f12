"""The step as a whole: one tiny model, plans by hand, tokens equal to transformers' greedy decoding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from common.columns import pack_i32
from common.protocol import Sampling, StepPlan

LENGTHS = [1, 2, 7, 8, 9, 23, 40, 64]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, 131, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def wanted(make_tiny: Callable[[str], Any], prompts: list[list[int]]) -> list[list[int]]:
    return [make_tiny("llama").greedy(prompt, 12) for prompt in prompts]


def test_one_at_a_time(tiny: Any, prompts: list[list[int]], wanted: list[list[int]]) -> None:
    driver = tiny.driver()
    assert [driver.generate([prompt], 12)[0] for prompt in prompts] == wanted


@pytest.mark.parametrize("chunk", [200, 16, 5, 1])
def test_all_at_once_under_any_chunking(
    tiny: Any, prompts: list[list[int]], wanted: list[list[int]], chunk: int
) -> None:
    assert tiny.driver().generate(prompts, 12, chunk) == wanted


@pytest.mark.parametrize("block_tokens", [1, 4, 64])
def test_any_block_size(tiny: Any, prompts: list[list[int]], wanted: list[list[int]], block_tokens: int) -> None:
    assert tiny.driver(300, block_tokens=block_tokens).generate(prompts, 12, 16) == wanted


def test_next_plan_does_not_need_the_last_result(tiny: Any, prompts: list[list[int]], wanted: list[list[int]]) -> None:
    """Ten plans are made before the first token is looked at."""
    driver, prompt = tiny.driver(), prompts[5]
    steps, position = [], 0
    for number in range(10):
        count = len(prompt) if number == 0 else 1
        added = [driver.start(3, prompt, range(5))] if number == 0 else []
        slots, positions, counts = (pack_i32([value]) for value in (3, position, count))
        plan = StepPlan(number, added=added, slots=slots, positions=positions, counts=counts, samples=b"\x01")
        steps.append(driver.runner.execute(plan))
        position += count
    assert all(step.ready() for step in steps)
    assert b"".join(step.tokens() for step in steps) == pack_i32(wanted[5][:10])


def test_preempted_row_continues_with_the_same_tokens(
    tiny: Any, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    """Removed after 5 tokens, added again elsewhere with prompt and output, nothing computed."""
    driver, prompt = tiny.driver(), prompts[6]
    output = driver.step([(0, 0, 40, True)], added=[driver.start(0, prompt, range(7))])
    for position in range(40, 44):
        output += driver.step([(0, position, 1, True)])
    again = driver.start(2, prompt + output, range(20, 28), num_prompt=40)
    output += driver.step([(2, 0, 45, True)], removed=pack_i32([0]), added=[again])
    for position in range(45, 51):
        output += driver.step([(2, position, 1, True)])
    assert output == wanted[6]


def test_preempted_sampling_row_draws_the_same_tokens(tiny: Any, prompts: list[list[int]]) -> None:
    sampling = Sampling(64, seed=77, temperature=1.2, top_p=0.95, frequency_penalty=0.7)
    driver, prompt = tiny.driver(), prompts[6]
    straight = driver.generate([prompt], 10, sampling=[sampling])[0]
    output = driver.step([(0, 0, 40, True)], added=[driver.start(0, prompt, range(7), sampling)])
    for position in range(40, 43):
        output += driver.step([(0, position, 1, True)])
    again = driver.start(1, prompt + output, range(8, 16), sampling, num_prompt=40)
    driver.step([(1, 0, 30, False)], removed=pack_i32([0]), added=[again])
    output += driver.step([(1, 30, 14, True)])
    for position in range(44, 49):
        output += driver.step([(1, position, 1, True)])
    assert output == straight


def test_prefix_hit_reads_the_other_rows_blocks(tiny: Any, prompts: list[list[int]], wanted: list[list[int]]) -> None:
    driver, prompt = tiny.driver(), prompts[7]
    driver.step([(0, 0, 64, True)], added=[driver.start(0, prompt, range(9))])
    hit = driver.start(1, prompt, [*range(7), 30, 31, 32], computed=56)
    output = driver.step([(0, 64, 1, True), (1, 56, 8, True)], added=[hit])[1:]
    for position in range(64, 75):
        output += driver.step([(1, position, 1, True)])
    assert output == wanted[7]


def test_copied_block_belongs_to_the_copy(tiny: Any, prompts: list[list[int]], wanted: list[list[int]]) -> None:
    """Two choices share full blocks and copy the partial one; the other goes its own way first."""
    driver, prompt = tiny.driver(), prompts[5]
    first = driver.step([(0, 0, 23, True)], added=[driver.start(0, prompt, [0, 1, 2, 3])])
    fork = driver.start(1, prompt, [0, 1, 9, 10, 11], computed=22)
    output = driver.step([(1, 22, 1, True)], added=[fork], copy_source=pack_i32([2]), copy_target=pack_i32([9]))
    strange = driver.start(2, [*prompt, 7], [0, 1, 2, 3], num_prompt=23, computed=23)
    driver.step([(2, 23, 1, True)], removed=pack_i32([0]), added=[strange])
    for position in range(23, 34):
        output += driver.step([(1, position, 1, True)])
    assert output == wanted[5] and first[0] == output[0]


def test_grown_blocks_reach_the_step_that_needs_them(
    tiny: Any, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    driver, prompt = tiny.driver(), prompts[3]
    output = driver.step([(0, 0, 8, True)], added=[driver.start(0, prompt, [5])])
    output += driver.step([(0, 8, 1, True)], grown_slots=pack_i32([0]), grown_blocks=pack_i32([40]))
    for position in range(9, 16):
        output += driver.step([(0, position, 1, True)])
    output += driver.step([(0, 16, 1, True)], grown_slots=pack_i32([0]), grown_blocks=pack_i32([2]))
    assert output == wanted[3][:10]


def test_same_seeded_request_alone_and_among_31_others(tiny: Any) -> None:
    generator = torch.Generator().manual_seed(9)
    prompts = [torch.randint(3, 131, (3 + i,), generator=generator).tolist() for i in range(32)]
    samplings = [
        Sampling(64, seed=100 + i, temperature=0.9, top_k=(i % 3) * 10, top_p=1 - i % 2 / 10) for i in range(32)
    ]
    together = tiny.driver(256).generate(prompts, 6, 16, samplings)
    for i in (0, 1, 14, 31):
        assert tiny.driver().generate([prompts[i]], 6, sampling=[samplings[i]])[0] == together[i]


def test_a_plan_without_rows_samples_nothing(tiny: Any) -> None:
    driver = tiny.driver()
    assert driver.step([]) == []
    assert driver.step([], added=[driver.start(0, [3, 4], [0])]) == []
    assert driver.step([(0, 0, 1, False)]) == []
    assert len(driver.step([(0, 1, 1, True)])) == 1
