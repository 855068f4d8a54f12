"""The scheduler's fleet in simulated lives; every seed is a scenario of its own (world.py says what is checked).

`make test-long` has five times as many.
"""

from functools import cache

import pytest

from tests.sim.world import World

SEEDS = 200
GROUP = 20


@cache
def met(seed: int) -> dict[str, float]:
    """What this life has met."""
    world = World(seed)
    try:
        world.run(actions=180)
    except BaseException as error:
        error.add_note(f"python -m tests.sim --first {seed} --seeds 1 --actions 180   ({world.limits} {world.facts})")
        raise
    heirs = [client.heir for client in world.clients.values() if client.heir is not None]
    taken_over = {"taken over": len(heirs), "in the middle": sum(1 for heir in heirs if heir.begun_with)}
    figures = world.fleet.metrics()
    kinds = {f"cached with a {kind}": figures["cached_tokens"] for kind in {group.kind for group in world.facts.groups}}
    return figures | taken_over | kinds


@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_every_life_ends_well(first: int) -> None:
    for seed in range(first, first + GROUP):
        met(seed)


def test_the_same_seed_gives_the_same_trace() -> None:
    assert [World(seed).run() for seed in (1, 2, 3)] == [World(seed).run() for seed in (1, 2, 3)]


def test_the_lives_meet_what_is_rare() -> None:
    """A simulator that never preempts or never fails proves nothing about these."""
    seen: dict[str, float] = {}
    for seed in range(60):
        for name, value in met(seed).items():
            seen[name] = seen.get(name, 0) + value
    for name in (
        "preemptions",
        "pauses",
        "cached_tokens",
        "failed_steps",
        "out_of_memory",
        "worker_faults",
        "refused",
        "unknown_results",
        "moved",
        "taken over",
        "in the middle",
        "cached with a window",
        "cached with a state",
    ):
        assert seen[name] > 5, f"{name}: {seen[name]}"
