"""Windows that give their pages back, on a GPU: in replayed graphs, behind the real scheduler core."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from common.config import Scheduler
from common.kv_needs import needs
from tests.services.worker.served import Serving

NEW = 60


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3", "mistral_window"])
@pytest.mark.parametrize("level", [0, 3])
def test_a_pool_too_small_for_all_pages_gives_the_same_tokens(
    make_small: Callable[[str], Any], name: str, level: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 500, (30 + 67 * i,), generator=generator).tolist() for i in range(11)]
    settings = [
        "model.dtype=float32",
        "model.max_len=1024",
        f"worker.compile_level={level}",
        "worker.max_graph_rows=16",
    ]

    def serve(blocks: int) -> list[list[int]]:
        driver = make_small(name).engine(*settings, f"kv.blocks={blocks}", "scheduler.max_rows=16")
        limits = Scheduler(max_rows=16, step_tokens=256)
        serving = Serving(driver.engine.facts, lambda plan: driver.engine.execute(plan).tokens(), limits)
        outputs = [serving.generate(prompts, NEW) for _ in range(2)]
        assert outputs[0] == outputs[1]
        return outputs[0]

    driver = make_small(name).engine(*settings, "kv.blocks=2000", "scheduler.max_rows=16")
    facts = driver.engine.facts
    assert any(group.kind == "window" for group in facts.groups)
    wanted = driver.generate(prompts, NEW)
    least = needs(facts.groups, 1, 1024, facts.block_tokens)[0]
    wishes = sum(needs(facts.groups, 1, len(prompt) + NEW, facts.block_tokens)[0] for prompt in prompts)
    assert wishes > least + 8, "whether they wait or are preempted is the scheduler's choice"
    assert serve(least + 8) == wanted
