import pytest
import torch

from services.worker.groups import Storage
from services.worker.models.registry import all_models
from services.worker.models.spec import Config
from tests.services.worker.tiny import config_values
from valence.kv_sizes import MIB, Attention, kept, read, rows

LLAMA_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def sizes(values: dict[str, object], eg_latent: int = 0) -> dict[str, int]:
    return {row["attention"]: row["bytes per token"] for row in rows(read(values), 2, eg_latent)}


def test_grouped_queries() -> None:
    assert sizes(LLAMA_8B) == {
        "MHA": 32 * 32 * 256 * 2,
        "GQA (this checkpoint)": 131_072,  # 128 KiB, as everybody knows of Llama-3-8B
        "MLA": 32 * (512 + 64) * 2,
        "EG-MLA": 32 * 231 * 2,
    }
    assert rows(read(LLAMA_8B), 1)[1]["tokens per GiB"] == 16_384
    plain = {key: value for key, value in LLAMA_8B.items() if key != "num_key_value_heads"}
    assert sizes(plain)["MHA (this checkpoint)"] == sizes(plain)["GQA"]


def test_a_latent() -> None:
    found = sizes(DEEPSEEK_V3)
    assert found["MLA (this checkpoint)"] == 70_272 == 61 * 576 * 2  # its paper's figure
    assert found["MHA"] == 61 * 128 * (192 + 128) * 2 and found["GQA"] == found["MHA"] // 8
    assert sizes(DEEPSEEK_V3, eg_latent=128)["EG-MLA"] == 61 * (128 + 64) * 2
    assert [row["to this"] for row in rows(read(DEEPSEEK_V3), 2)][2:] == ["1.00", "0.40"]


def test_the_text_part_counts_and_mistakes_are_named() -> None:
    assert read({"text_config": LLAMA_8B, "hidden_size": 3}) == Attention(32, 32, 8, 128, 128, 0, 0)
    for changes, text in (
        ({"num_attention_heads": 0}, "0 heads"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
    ):
        with pytest.raises(ValueError, match=text):
            read(LLAMA_8B | changes)


def test_what_sequences_take_of_layers_with_and_without_a_window() -> None:
    """gpt-oss-20b: 12 layers of either kind, 8 heads of 64, a window of 128."""
    values = config_values("GptOssForCausalLM") | {
        "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "sliding_window": 128,
        "num_key_value_heads": 8,
        "num_attention_heads": 64,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
    }
    spec = all_models()["GptOssForCausalLM"].model.read(Config(values))
    window, full, together = kept(spec, 16, Storage(torch.bfloat16, torch.bfloat16))
    token = 12 * 2 * 8 * 64 * 2
    assert (full["kept"], full["bytes per token"], full["MiB of 131,072 tokens"]) == ("all tokens", token, 3072.0)
    assert (window["kept"], window["MiB of 131,072 tokens"]) == ("the last 128 tokens", round(128 * token / MIB, 1))
    assert together["bytes per token"] == 2 * token and together["layers"] == 24
    assert together["MiB of 8,192 tokens"] == round((8192 + 160) * token / MIB, 1)
