from typing import Any

import pytest

from services.worker.models import llama
from services.worker.models.spec import Config

BASE: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def test_biases_follow_the_config() -> None:
    plain = llama.read(Config(BASE))
    assert not (plain.qkv_bias or plain.out_bias or plain.mlp_bias or plain.qk_norm)
    biased = llama.read(Config(BASE | {"attention_bias": True, "mlp_bias": True}))
    assert biased.qkv_bias and biased.out_bias and biased.mlp_bias


def test_a_sliding_window_is_refused_unless_it_covers_the_context() -> None:
    assert llama.read(Config(BASE | {"sliding_window": None})) == llama.read(Config(BASE | {"sliding_window": 64}))
    with pytest.raises(ValueError, match="sliding_window"):
        llama.read(Config(BASE | {"sliding_window": 32}))
