from pathlib import Path

import pytest

from common import config as configuration
from common.config import Config, Worker
from common.errors import ConfigError
from services.worker.kernels.registry import all_ops
from valence import listings


def test_models_name_their_file_and_features() -> None:
    by_name = {row["architecture"]: row for row in listings.models()}
    assert by_name["LlamaForCausalLM"]["file"] == "llama.py"
    assert by_name["Qwen3ForCausalLM"]["features"]
    assert all(row.keys() == {"architecture", "file", "features"} for row in by_name.values())


def test_ops_say_what_runs_and_why() -> None:
    rows = listings.ops(Worker(device="cpu", kernels=("torch",)))
    assert [row["op"] for row in rows] == sorted(all_ops())
    assert all(row.keys() == {"op", "provider", "reason"} for row in rows)
    assert {row["provider"] for row in rows} == {"torch"}


def test_facts_of_the_cpu() -> None:
    assert listings.facts("cpu").device == "cpu"


def test_kv_of_the_bundled_model() -> None:
    rows = {row["attention"]: row["bytes per token"] for row in listings.kv(Config())}
    assert rows["GQA (this checkpoint)"] == 30 * 3 * 64 * 2 * 2
    narrow = configuration.load(None, ["kv.dtype=fp8"])
    assert listings.kv(narrow)[1]["bytes per token"] == 30 * 3 * 64 * 2


def test_what_sequences_of_the_bundled_model_take() -> None:
    layers, together = listings.kept(Config())
    assert (layers["layers"], layers["bytes per token"]) == (30, 30 * 3 * 64 * 2 * 2)
    assert together["MiB of 8,192 tokens"] == layers["MiB of 8,192 tokens"] == 180.0


def test_kv_of_a_configuration_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": "many"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="'num_attention_heads' is 'many'"):
        listings.kv(configuration.load(None, [f"model.source={tmp_path}"]))
