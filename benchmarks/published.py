"""Models whose layers are not all alike, as published but with fewer layers, so that one GPU of 139 GiB holds them.

What `config.json` has, which benchmarks/models.py writes with a tokenizer, and what roofline.py makes floors of.
"""

from typing import Any, NamedTuple

from benchmarks.shapes import LayerKind, ModelShape


class Published(NamedTuple):
    """`shape`: widths of a layer that attends, and what kinds of layers there are."""

    shape: ModelShape
    config: dict[str, Any]


COMMON = {"attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
NEXT_GATE = 2048  # elements, of the shared expert
# queries with their gates, keys, values, output; keys and values of 2 heads
NEXT_FULL = LayerKind(6, 2048 * (2 * 16 + 2 * 2) * 256 + 16 * 256 * 2048 + NEXT_GATE, 2 * 2 * 256, 2 * 16 * 256)
# queries, keys, values and gates, two numbers a value head, a convolution of 4 taps, output. The state: a matrix in
# fp32 of each of 32 value heads, which a token reads twice and adds to, and the last 3 inputs of the convolution
NEXT_DELTA = LayerKind(
    18,
    attention=2048 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) + 4 * 8192 + 32 * 128 * 2048 + NEXT_GATE,
    kv=0,
    state_bytes=2 * (32 * 128 * 128 * 4 + 3 * 8192 * 2),
    token=3 * 32 * 128 * 128,
)
# 24 of Qwen3-Next-80B-A3B's 48 layers: 81 GB
QWEN3_NEXT_CUT = Published(
    ModelShape(
        "Qwen3-Next-80B-A3B-24L", 24, 2048, 16, 2, 256, 512, 151936, experts=512, top_k=10, qk_norm=True
    )._replace(shared=1, own_kinds=(NEXT_DELTA, NEXT_FULL)),
    COMMON
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262_144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10_000_000,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151_936,
    },
)
# 64 query heads of 192; keys of 192 and values of 128 for 4 heads, in the windows for 8
MIMO_FULL = LayerKind(
    1, 4096 * (64 * 192 + 4 * 320) + 64 * 128 * 4096, kv=4 * 320, pair=64 * 320, dense=3 * 4096 * 16_384
)
MIMO_WINDOW = LayerKind(6, 4096 * (64 * 192 + 8 * 320) + 64 * 128 * 4096, kv=8 * 320, pair=64 * 320, window=129)
# 8 of MiMo-V2-Flash's 48 layers: 93 GB
MIMO_CUT = Published(
    ModelShape("MiMo-V2-Flash-8L", 8, 4096, 64, 4, 192, 2048, 152576, experts=256, top_k=8)._replace(
        own_kinds=(MIMO_FULL, MIMO_FULL._replace(dense=0), MIMO_WINDOW)
    ),
    COMMON
    | {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "attention_value_scale": 0.707,
        "head_dim": 192,
        "hidden_size": 4096,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1],
        "intermediate_size": 16_384,
        "layernorm_epsilon": 1e-5,
        "max_position_embeddings": 262_144,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1],
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": None,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5_000_000,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
        "sliding_window": 128,
        "sliding_window_size": 128,
        "swa_head_dim": 192,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_rope_theta": 10_000,
        "swa_v_head_dim": 128,
        "topk_group": 1,
        "v_head_dim": 128,
        "vocab_size": 152_576,
    },
)
PUBLISHED = {"qwen3-next-cut": QWEN3_NEXT_CUT, "mimo-cut": MIMO_CUT}
