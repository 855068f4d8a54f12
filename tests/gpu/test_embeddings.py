"""Vectors on the GPU against transformers: chunked beside a row that decodes, replayed and not; nothing is built."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from common.columns import pack_i32
from common.logprobs import Report
from common.pooling import Pooling
from common.protocol import RowStart, Sampling
from services.worker.compile import builds, newest_builds
from tests.gpu.conftest import GREEDY
from tests.gpu.test_tokens import make_prompts

CHUNK = 96
POOLINGS = [Pooling("last"), Pooling("mean"), Pooling("mean", normalize=False), Pooling("last", dimensions=64)]


@torch.inference_mode()
def wanted(small: Any, prompt: list[int], pooling: Pooling) -> np.ndarray:
    hidden = small.reference.model(torch.tensor([prompt]).cuda()).last_hidden_state[0].float()
    vector = hidden[-1] if pooling.mode == "last" else hidden.mean(0)
    vector = vector[: pooling.dimensions or None]
    found = torch.nn.functional.normalize(vector, dim=0) if pooling.normalize else vector
    return found.cpu().numpy()


@pytest.mark.parametrize("only_last", [True, False], ids=["replayed", "means"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_equal_to_transformers(make_small: Callable[[str], Any], name: str, only_last: bool) -> None:
    small, (first, *prompts) = make_small(name), make_prompts(9, 300, seed=5)
    driver = small.engine("model.dtype=float32", "worker.compile_level=3")
    driver.generate([first], 4)
    before = builds()
    poolings = [POOLINGS[0] if only_last else POOLINGS[slot % 4] for slot in range(len(prompts))]
    size, taken, added = driver.engine.facts.block_tokens, 0, []
    samplings = [GREEDY, *(Sampling(0, report=Report(pooling=pooling)) for pooling in poolings)]
    for slot, (prompt, sampling) in enumerate(zip([first, *prompts], samplings, strict=True)):
        needed = -(-(len(prompt) + 64) // size)
        blocks = pack_i32(range(taken, taken + needed))
        added.append(RowStart(slot, slot, pack_i32(prompt), len(prompt), 0, blocks, sampling))
        taken += needed
    pending = [driver.execute([(0, 0, len(first), True)], added=added)]
    rows: list[list[int]] = [[0]]
    todo = [(slot, at) for slot, prompt in enumerate(prompts, 1) for at in range(0, len(prompt), CHUNK)]
    for turn, (slot, at) in enumerate(todo):
        count = min(CHUNK, len(prompts[slot - 1]) - at)
        pending.append(driver.execute([(0, len(first) + turn, 1, True), (slot, at, count, False)]))
        rows.append([0, slot])
        pending[-2].tokens()
    vectors: dict[int, np.ndarray] = {}
    for slots, each in zip(rows, pending, strict=True):
        each.tokens()
        for place, vector in (told.vectors if (told := each.logprobs()) is not None else {}).items():
            assert slots[place] not in vectors
            vectors[slots[place]] = np.frombuffer(vector, np.float32)
    assert sorted(vectors) == list(range(1, 9))
    late = sum(builds()) - sum(before)  # before the reference runs, which may build what it likes
    assert late == 0, newest_builds(late)
    for slot, (prompt, pooling) in enumerate(zip(prompts, poolings, strict=True), 1):
        assert vectors[slot] == pytest.approx(wanted(small, prompt, pooling), abs=1e-4)
    driver.engine.close()
