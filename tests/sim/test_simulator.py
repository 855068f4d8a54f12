"""The scheduler's fleet in simulated lives; every seed is a scenario of its own (world.py says what is checked).

`make test-long` has three times as many.
"""

import pytest

from tests.sim.world import World

SEEDS = 300
GROUP = 20


@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_every_life_ends_well(first: int) -> None:
    for seed in range(first, first + GROUP):
        world = World(seed)
        try:
            world.run(actions=180)
        except BaseException as error:
            error.add_note(
                f"python -m tests.sim --first {seed} --seeds 1 --actions 180   ({world.limits} {world.facts})"
            )
            raise


def test_the_same_seed_gives_the_same_trace() -> None:
    assert [World(seed).run() for seed in (1, 2, 3)] == [World(seed).run() for seed in (1, 2, 3)]


def test_the_lives_meet_what_is_rare() -> None:
    """A simulator that never preempts or never fails proves nothing about these."""
    seen: dict[str, float] = {}
    for seed in range(60):
        world = World(seed)
        world.run(actions=180)
        heirs = [client.heir for client in world.clients.values() if client.heir is not None]
        taken_over = {"taken over": len(heirs), "in the middle": sum(1 for heir in heirs if heir.begun_with)}
        cached = world.fleet.metrics()["cached_tokens"]
        kinds = {f"cached with a {kind}": cached for kind in {group.kind for group in world.facts.groups}}
        for name, value in (world.fleet.metrics() | taken_over | kinds).items():
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
