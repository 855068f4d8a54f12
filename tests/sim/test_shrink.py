"""A failing life becomes a short one."""

import pytest

from services.scheduler.blocks import BlockPool
from tests.sim.shrink import Decisions, failure, shrink, tell
from tests.sim.world import World


def test_recorded_decisions_are_those_of_the_seed_and_can_be_repeated() -> None:
    for seed in range(4):
        trace = World(seed).run(60)
        traces: list[World] = []
        recorder = Decisions(seed)
        assert failure(seed, recorder, 60, traces.append) == ""
        assert failure(seed, Decisions(seed, recorder.script), 60, traces.append) == ""
        assert [world.trace.hexdigest() for world in traces] == [trace, trace]


def test_a_life_that_does_not_fail_is_not_shrunk() -> None:
    assert shrink(1, 30) is None


def test_a_broken_core_is_shown_in_a_handful_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def forget_one(self: BlockPool, blocks: list[int]) -> None:
        release(self, blocks[:-1] if len(blocks) > 2 else blocks)

    monkeypatch.setattr(BlockPool, "release", forget_one)
    seed = next(seed for seed in range(20) if failure(seed, Decisions(seed), 120))
    script = shrink(seed, 120, most=1500)
    assert script is not None
    assert script.size[0] <= 6, "\n".join(tell(seed, script))
    lines = tell(seed, script)
    assert lines[-1].startswith("AssertionError")
    assert any("Admit" in line for line in lines)
