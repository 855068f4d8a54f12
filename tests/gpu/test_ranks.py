"""A model divided between two GPUs: NCCL's sums in captured steps. Each test has a group of its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from common.protocol import Sampling
from tests.gpu.conftest import EXACT, ROUNDED
from tests.gpu.test_tokens import LEVELS, agreement, make_prompts

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@contextmanager
def divided(small: Any, folder: Path, *settings: str) -> Iterator[Any]:
    driver = small.engine("worker.tensor_parallel=2", f"links.run_dir={folder}", *settings)
    try:
        yield driver
    finally:
        driver.engine.close()


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_against_fp32(make_small: Callable[[str], Any], tmp_path: Path, name: str, level: str) -> None:
    """Heads of the llama are 9 and 3: shares differ."""
    small, prompts = make_small(name), make_prompts(256, 120)
    with divided(small, tmp_path, *LEVELS[level]) as driver:
        outputs = driver.generate(prompts, 41)
    share, clear, positions = agreement(small, prompts, outputs)
    print(f"{name} {level}, two ranks, batch 256: {share:.4%} of {clear} clear of {positions} positions")
    assert positions >= 10_000 and clear > positions // 4 and share >= 0.99


@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_say_in_float32_what_one_says(make_small: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    """Greedy and drawn, replayed; sums of two halves may turn a row where two tokens are as good."""
    small, prompts = make_small(name), make_prompts(24, 100, seed=2)
    kinds = [
        Sampling(999, temperature=0.0),
        Sampling(999, seed=1, temperature=0.8),
        Sampling(999, seed=2, temperature=1.2, top_p=0.9),
        Sampling(999, seed=3, top_k=20, min_p=0.01),
    ]
    sampling = [kinds[i % len(kinds)] for i in range(24)]
    exact = ("model.dtype=float32", *LEVELS["graphs"])
    alone = small.engine(*exact).generate(prompts, 40, sampling)
    with divided(small, tmp_path, *exact) as driver:
        together = driver.generate(prompts, 40, sampling)
    same = sum(left == right for left, right in zip(alone, together, strict=True))
    print(f"{name}: {same} of 24 rows are the same")
    assert same >= 23
