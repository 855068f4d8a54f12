from typing import Any

import pytest

from services.worker.models import qwen3_moe
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
    "moe_intermediate_size": 8,
    "num_experts": 6,
    "norm_topk_prob": True,
}


def test_experts_of_both_generations_of_configs() -> None:
    spec = qwen3_moe.read(Config(BASE | {"head_dim": 16}))
    assert spec.qk_norm and spec.moe == MoeSpec(6, 2, 8, True)
    new = {key: value for key, value in BASE.items() if key != "num_experts"} | {"num_local_experts": 6}
    assert qwen3_moe.read(Config(new)).moe == spec.moe
    unscaled = qwen3_moe.read(Config(BASE | {"norm_topk_prob": None})).moe
    assert unscaled is not None and not unscaled.renormalize


def test_some_layers_may_be_dense() -> None:
    spec = qwen3_moe.read(Config(BASE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}))
    assert [spec.experts_of(layer) is not None for layer in range(4)] == [False, True, False, False]


def test_what_cannot_run_is_refused_by_name() -> None:
    for changes, text in (
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"num_experts": None}, "'num_local_experts' is missing"),
        ({"num_experts_per_tok": 7}, "'num_experts_per_tok' is 7, but there are 6 experts"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' is 0"),
        ({"mlp_only_layers": 3}, "'mlp_only_layers' is 3, expected list"),
        ({"moe_intermediate_size": None}, "'moe_intermediate_size' is missing"),
    ):
        with pytest.raises(ValueError, match=text):
            qwen3_moe.read(Config(BASE | changes))
