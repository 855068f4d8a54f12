"""The rule on simulated conversations: loads stay within the bound, and most turns find their prefix."""

import random
from array import array
from collections import Counter

import pytest

from services.tokenizer.choice import HEADROOM, LEVELS, SLACK, Candidate, choose


def candidates(*num_open: int) -> list[Candidate]:
    return [Candidate(instance, count, 100) for instance, count in enumerate(num_open)]


def prompt(seed: int, size: int) -> bytes:
    return array("i", random.Random(seed).choices(range(50_000), k=size)).tobytes()


def test_one_candidate_needs_no_thought() -> None:
    assert choose(prompt(0, 100), "", 1, [Candidate(3, 10_000, 0)]) == 3


def test_idle_schedulers_get_a_prefix_by_its_beginning() -> None:
    for seed in range(50):
        first = choose(prompt(seed, LEVELS[0]), "", 1, candidates(0, 0, 0))
        longer = [choose(prompt(seed, size), "", size, candidates(0, 0, 0)) for size in (65, 300, 5000)]
        assert longer == [first] * 3


def test_prefixes_are_shared_out_by_capacity_and_salt() -> None:
    equal = Counter(choose(prompt(seed, 100), "", 1, candidates(0, 0, 0)) for seed in range(900))
    assert all(250 < equal[instance] < 350 for instance in range(3))
    uneven = [Candidate(0, 0, 300), Candidate(1, 0, 100)]
    shares = Counter(choose(prompt(seed, 100), "", 1, uneven) for seed in range(800))
    assert 550 < shares[0] < 650
    salted = Counter(choose(prompt(7, 100), str(salt), 1, candidates(0, 0)) for salt in range(200))
    assert 70 < salted[0] < 130


def test_a_scheduler_that_comes_or_goes_moves_only_its_own_share() -> None:
    four = [choose(prompt(seed, 100), "", 1, candidates(0, 0, 0, 0)) for seed in range(400)]
    three = [choose(prompt(seed, 100), "", 1, candidates(0, 0, 0)) for seed in range(400)]
    assert all(before == after for before, after in zip(four, three, strict=True) if before != 3)


def test_short_prompts_go_to_the_emptier() -> None:
    assert {choose(prompt(seed, 63), "", seed, candidates(5, 4)) for seed in range(50)} == {1}
    found = Counter(choose(prompt(0, 10), "", seed, candidates(2, 2, 2)) for seed in range(300))
    assert all(60 < found[instance] < 140 for instance in range(3))


def test_an_owner_that_is_full_is_passed_over() -> None:
    owner = choose(prompt(1, 100), "", 1, candidates(0, 0))
    loads = [0, 0]
    loads[owner] = 100
    assert choose(prompt(1, 100), "", 1, candidates(*loads)) == 1 - owner
    unknown = [Candidate(instance, load, 0) for instance, load in enumerate(loads)]
    assert choose(prompt(1, 100), "", 1, unknown) == 1 - owner


@pytest.mark.parametrize(
    ("schedulers", "systems", "system_tokens", "kept"),
    [(2, 400, 0, 0.93), (4, 50, 500, 0.85), (2, 1, 1000, 0.75), (4, 1, 1000, 0.60), (4, 1, 40, 0.85)],
)
def test_conversations(schedulers: int, systems: int, system_tokens: int, kept: float) -> None:
    """400 conversations of 6 turns over some system prompts, 64 at a time."""
    rng = random.Random(1)
    chats = [(array("i", prompt(i % systems, system_tokens)), [-1], [6]) for i in range(400)]
    loads, running, hits, follow_ups, number = [0] * schedulers, [], 0, 0, 0
    while chats or running:
        while chats and len(running) < 64:
            chat = chats.pop(rng.randrange(len(chats)))
            tokens, last, left = chat
            tokens.extend(rng.choices(range(50_000), k=rng.randrange(50, 300)))
            mean = sum(loads) / schedulers
            chosen = choose(tokens.tobytes(), "", number, candidates(*loads))
            assert loads[chosen] < HEADROOM * mean + SLACK
            hits += chosen == last[0]
            follow_ups += last[0] >= 0
            number += 1
            last[0], left[0] = chosen, left[0] - 1
            loads[chosen] += 1
            running.append((chosen, chat))
        chosen, chat = running.pop(rng.randrange(len(running)))
        loads[chosen] -= 1
        if chat[2][0]:
            chats.append(chat)
    assert follow_ups == 2000 and hits / follow_ups > kept
