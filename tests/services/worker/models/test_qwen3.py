from typing import Any

import pytest

from services.worker.models import qwen3
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


def test_heads_are_normed_and_sized_by_the_config() -> None:
    spec = qwen3.read(Config(BASE | {"head_dim": 16}))
    assert spec.qk_norm and spec.head_dim == 16 and not spec.qkv_bias


def test_a_sliding_window_in_use_is_refused() -> None:
    with pytest.raises(ValueError, match="use_sliding_window"):
        qwen3.read(Config(BASE | {"use_sliding_window": True}))
