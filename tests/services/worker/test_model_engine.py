"""A whole engine on a tiny checkpoint in a folder, as the worker process makes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common import config as configuration
from common.columns import pack_i32, unpack_i32
from common.errors import ConfigError
from common.protocol import Progress, RowStart, Sampling, StepPlan
from services.worker.kernels.registry import Facts
from services.worker.model_engine import ModelEngine, choose_device, facts_of


@pytest.fixture
def folder(make_tiny: Callable[[str], Any], tmp_path: Path) -> Path:
    make_tiny("qwen3").reference.save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, *settings: str) -> tuple[ModelEngine, list[Progress]]:
    stages: list[Progress] = []
    threads = torch.get_num_threads()
    common = [f"model.source={folder}", "model.dtype=float32", f"worker.threads={threads}", "worker.device=cpu"]
    return ModelEngine(configuration.load(None, [*common, *settings]), stages.append), stages


def test_serves_transformers_tokens(folder: Path, make_tiny: Callable[[str], Any]) -> None:
    engine, stages = load(folder, "kv.block_tokens=8", "scheduler.max_rows=3", "kv.memory_gib=0.01")
    assert engine.max_rows == 3
    facts = engine.facts
    assert (facts.architecture, facts.vocab_size, facts.max_model_len) == ("Qwen3ForCausalLM", 131, 256)
    assert (facts.block_tokens, facts.num_blocks, facts.dtype, facts.eos_token_ids) == (8, 96, "float32", (2,))
    names = list(dict.fromkeys(stage.stage for stage in stages))
    assert names == ["model", "kernels", "weights", "memory", "compile"]
    assert engine.figures["startup_seconds"] > engine.figures["startup_compile_seconds"] > 0
    weights = [stage for stage in stages if stage.stage == "weights"]
    assert weights[-1].done == weights[-1].total > 0
    prompt = list(range(5, 25))
    row = RowStart(1, 9, pack_i32(prompt), 20, 0, pack_i32(range(3)), Sampling(4, temperature=0.0))
    for _ in range(2):
        plan = StepPlan(
            1, added=[row], slots=pack_i32([1]), positions=pack_i32([0]), counts=pack_i32([20]), samples=b"\x01"
        )
        assert list(unpack_i32(engine.execute(plan).tokens())) == make_tiny("qwen3").greedy(prompt, 1)
        engine.reset()


def test_max_len_can_be_lowered_not_raised(folder: Path) -> None:
    engine, _ = load(folder, "model.max_len=100", "kv.blocks=20", "model.name=mine")
    assert (engine.facts.max_model_len, engine.facts.num_blocks, engine.facts.name) == (100, 20, "mine")
    with pytest.raises(ConfigError, match=r"max_len is 300, the model was made for at most 256"):
        load(folder, "model.max_len=300")


def test_random_weights_need_no_checkpoint(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no .safetensors file"):
        load(folder)
    engine, _ = load(folder, "model.weights=random", "kv.blocks=20")
    assert engine.facts.architecture == "Qwen3ForCausalLM"


def test_what_cannot_run_is_a_configuration_error(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("Qwen3ForCausalLM", "NobodyForCausalLM"))
    with pytest.raises(ConfigError, match=r"NobodyForCausalLM is not supported; supported: LlamaForCausalLM"):
        load(folder)
    (folder / "config.json").write_text(text.replace('"silu"', '"gelu"'))
    with pytest.raises(ConfigError, match="hidden_act"):
        load(folder)
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="no provider can run it on cpu"):
        load(folder, 'worker.kernels=["aiter"]')


def test_device_and_facts(make_tiny: Callable[[str], Any]) -> None:
    assert choose_device("cpu") == torch.device("cpu")
    spec = make_tiny("qwen3").decoder.spec
    facts = facts_of(torch.device("cpu"), torch.float32, spec, 16)
    assert isinstance(facts, Facts) and (facts.device, facts.arch) == ("cpu", "")
    assert facts.shapes["head_dim"] == 16 and facts.shapes["block_tokens"] == 16


def test_a_missing_gpu_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="sees no GPU"):
        choose_device("cuda")
