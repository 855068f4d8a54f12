from typing import Any

import pytest

from services.worker.models import mixtral
from services.worker.models.spec import Config, MoeSpec

BASE: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}


def test_every_layer_is_a_mixture_as_wide_as_the_config_says() -> None:
    spec = mixtral.read(Config(BASE))
    assert spec.moe == MoeSpec(8, 2, 16, True)
    assert all(spec.experts_of(layer) for layer in range(4)) and not spec.qk_norm


def test_a_sliding_window_is_refused_unless_it_covers_the_context() -> None:
    assert mixtral.read(Config(BASE | {"sliding_window": 64})) == mixtral.read(Config(BASE))
    with pytest.raises(ValueError, match="sliding_window"):
        mixtral.read(Config(BASE | {"sliding_window": 32}))
