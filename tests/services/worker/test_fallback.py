"""Families without a file of ours, by transformers with our paged attention."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from common import config as configuration
from common.columns import pack_i32, unpack_i32
from common.errors import ConfigError
from common.protocol import RowStart, Sampling, StepPlan
from services.worker import fallback
from services.worker.kernels.ops.paged_attention import make_attention_rows
from services.worker.kernels.registry import Facts, bind
from services.worker.model_engine import ModelEngine
from services.worker.models.registry import all_models
from services.worker.models.spec import Config
from tests.services.worker.layers.test_decoder import run
from tests.services.worker.tiny import COMMON, Tiny, make_reference

# norms behind each part; a window and fused projections; a window in some layers and capped scores
FAMILIES = ["Olmo2ForCausalLM", "Phi3ForCausalLM", "Gemma2ForCausalLM"]
PROMPT = [int(token) for token in torch.randint(3, 120, (150,), generator=torch.Generator().manual_seed(4))]


def make(name: str, folder: Path) -> Tiny:
    reference = make_reference(name)
    reference.save_pretrained(folder)
    spec = fallback.read(Config(json.loads((folder / "config.json").read_text())))
    bindings = bind(("torch",), Facts("cpu"))
    return Tiny(reference, folder, fallback.load(name, folder, spec, torch.float32, torch.device("cpu"), bindings))


@pytest.mark.parametrize("name", FAMILIES)
def test_gives_transformers_logits_and_tokens(name: str, tmp_path: Path) -> None:
    assert name not in all_models()
    tiny = make(name, tmp_path)
    expected = tiny.logits(PROMPT)
    assert expected.std() > 0.5
    torch.testing.assert_close(run(tiny.decoder, PROMPT, [64, 63, 22, 1]), expected, rtol=0, atol=1e-4)
    prompts = [PROMPT[:2], PROMPT[20:30], PROMPT[40:90]]
    wanted = tiny.driver().generate(prompts, 6)
    assert wanted == [tiny.greedy(prompt, 6) for prompt in prompts] == tiny.driver().generate(prompts, 6, 7)


def engine(folder: Path, *settings: str) -> ModelEngine:
    base = [f"model.source={folder}", "model.dtype=float32", "worker.device=cpu", "kv.blocks=20"]
    return ModelEngine(configuration.load(None, [*base, *settings]), lambda progress: None)


def test_the_engine_serves_it_eagerly_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = make(FAMILIES[0], tmp_path)
    served = engine(tmp_path, "worker.compile_level=2")
    assert served.facts.architecture == FAMILIES[0] and "slower than a model file" in caplog.text
    prompt = PROMPT[:20]
    row = RowStart(0, 1, pack_i32(prompt), 20, 0, pack_i32(range(3)), Sampling(2, temperature=0.0))
    one = {"slots": [0], "positions": [0], "counts": [20]}
    plan = StepPlan(1, added=[row], samples=b"\1", **{key: pack_i32(value) for key, value in one.items()})
    assert list(unpack_i32(served.execute(plan).tokens())) == tiny.greedy(prompt, 1)
    for setting in ("model.weights=random", "worker.tensor_parallel=2"):
        with pytest.raises(ConfigError, match="has no model file: no random weights, and one rank only"):
            engine(tmp_path, setting)


def test_a_model_with_a_state_of_its_own_is_refused(tmp_path: Path) -> None:
    """LFM2 has convolutions beside attention."""
    layers = {"layer_types": ["conv", "full_attention", "conv"], "head_dim": 8}
    config = transformers.Lfm2Config(**{**COMMON, **layers})
    transformers.Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"Lfm2ForCausalLM with paged attention is .*% away from itself"):
        engine(tmp_path)


def test_attention_in_another_way_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fallback.attend

    def other(*arguments: Any, **keywords: Any) -> Any:
        return whole(*arguments, **keywords | {"scaling": 0.1})

    monkeypatch.setattr(fallback, "attend", other)
    with pytest.raises(ConfigError, match="attends in another way"):
        make(FAMILIES[0], tmp_path)


def test_what_a_configuration_lacks_is_named(tmp_path: Path) -> None:
    values = {**COMMON, "num_attention_heads": 0}
    with pytest.raises(ValueError, match="0 query heads"):
        fallback.read(Config(values))
    with pytest.raises(ValueError, match="'hidden_size' is missing"):
        fallback.read(Config({"architectures": FAMILIES}))
    with pytest.raises(ValueError, match=r"NobodyForCausalLM is not supported"):
        fallback.find(["NobodyForCausalLM"], configuration.Config())
    assert fallback.find(["LlamaForCausalLM"], configuration.Config())[1] is all_models()["LlamaForCausalLM"].model


def test_positions_are_the_last_of_each_rows_context() -> None:
    rows = make_attention_rows([1, 3, 2], [8, 3, 12], [[0], [1], [2, 3]], 8)
    assert fallback.positions_of(rows, 6).tolist() == [7, 0, 1, 2, 10, 11]
