from typing import Any

import pytest

from services.worker.models import qwen2
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


def test_only_q_k_v_have_biases() -> None:
    spec = qwen2.read(Config(BASE | {"sliding_window": 32, "use_sliding_window": False}))
    assert spec.qkv_bias and not spec.out_bias and not spec.mlp_bias and not spec.qk_norm


def test_a_sliding_window_in_use_is_refused() -> None:
    with pytest.raises(ValueError, match="use_sliding_window"):
        qwen2.read(Config(BASE | {"use_sliding_window": True}))
