"""Start-up on a GPU: what a second start compiles, how much memory is taken, what a step without memory does."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.columns import pack_i32, unpack_i32
from common.protocol import RowStart
from tests.gpu.conftest import GREEDY

START = """
import json, sys
from common import config
from services.worker.model_engine import ModelEngine
stages = []
engine = ModelEngine(config.load(None, sys.argv[1:]), lambda progress: stages.append(progress.stage))
print(json.dumps([list(dict.fromkeys(stages)), engine.figures()]))
"""


@pytest.mark.parametrize("level", [0, 2, 3])
def test_a_second_start_compiles_nothing(make_small: Callable[[str], Any], tmp_path: Path, level: int) -> None:
    settings = [
        f"model.source={make_small('qwen3').folder}",
        f"worker.cache_dir={tmp_path}",
        f"worker.compile_level={level}",
        'worker.kernels=["triton","torch"]',
        "worker.max_graph_rows=16",
        "worker.self_test=off",  # it compiles too
        "kv.blocks=500",
    ]
    starts = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", START, *settings], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        stages, figures = json.loads(done.stdout.splitlines()[-1])
        assert stages == ["model", "kernels", "weights", "compile", "memory", *(["capture"] if level == 3 else [])]
        starts.append(figures)
    cold, warm = starts
    assert cold["kernels_compiled"] > 0 and warm["kernels_compiled"] == 0, starts
    assert warm["kernels_found"] > 0 and warm["startup_seconds"] < cold["startup_seconds"], starts


def test_the_configured_share_of_memory_is_used(make_small: Callable[[str], Any]) -> None:
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.1  # what is in use already, and a tenth
    torch.cuda.empty_cache()
    # a cache is never larger than its rows can fill, so there are many
    settings = (
        "kv.blocks=0",
        f"kv.gpu_memory_utilization={share}",
        "scheduler.max_rows=4096",
        "worker.max_graph_rows=16",
    )
    driver = make_small("llama").engine(*settings)
    free, _ = torch.cuda.mem_get_info()
    assert share - 0.02 < (total - free) / total < share + 0.01
    assert driver.engine.facts.num_blocks > 1000


def test_a_step_without_memory_is_survived(make_small: Callable[[str], Any]) -> None:
    driver = make_small("llama").engine("scheduler.step_tokens=8192", "scheduler.max_rows=4", "kv.blocks=700")
    prompts = [[(slot * 7 + idx) % 4000 for idx in range(2000)] for slot in range(4)]
    added = [
        RowStart(slot, slot, pack_i32(prompt), 2000, 0, pack_i32(range(slot * 126, slot * 126 + 126)), GREEDY)
        for slot, prompt in enumerate(prompts)
    ]
    work = [(slot, 0, 2000, True) for slot in range(4)]
    wanted = list(unpack_i32(driver.execute(work, added=added).tokens()))
    results = []
    total = torch.cuda.mem_get_info()[1]
    for spare in (24 << 20, 4 << 20):
        driver.engine.reset()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare) / total)
        try:
            results.append(driver.execute(work, added=added))
            results[-1].tokens()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert results[0].failed == b"" and list(unpack_i32(results[0].tokens())) == wanted
    if results[1].failed:  # the smallest pieces may live in what lies between tensors
        assert set(unpack_i32(results[1].failed)) <= set(range(4))
    driver.engine.reset()
    assert list(unpack_i32(driver.execute(work, added=added).tokens())) == wanted
