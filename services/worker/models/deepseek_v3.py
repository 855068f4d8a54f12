"""DeepSeek-V3, R1 and Kimi-K2: latent attention, experts in groups by corrected sigmoid scores, and shared ones."""

from collections.abc import Mapping
from dataclasses import replace
from math import log
from typing import Any

from services.worker.models.glm4_moe import NAMES as GLM4_NAMES
from services.worker.models.glm4_moe import read_groups
from services.worker.models.spec import (
    MOST,
    Config,
    DecoderSpec,
    GroupedRouting,
    ModelDef,
    MoeSpec,
    RopeSpec,
    read_decoder,
    read_moe,
    read_rope,
)
from services.worker.models.spec_latent import LatentNames, LatentSpec

NAMES = replace(
    GLM4_NAMES,
    latent=LatentNames(
        q_a="model.layers.{i}.self_attn.q_a_proj.weight",
        q_a_norm="model.layers.{i}.self_attn.q_a_layernorm.weight",
        q_b="model.layers.{i}.self_attn.q_b_proj.weight",
        kv_a="model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight",
        kv_a_norm="model.layers.{i}.self_attn.kv_a_layernorm.weight",
        kv_b="model.layers.{i}.self_attn.kv_b_proj.weight",
    ),
)
# what transformers takes for keys that a configuration leaves out
DEFAULTS: Mapping[str, object] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rope_interleave": True,
}


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    config = config.over(DEFAULTS)
    config.require("topk_method", ("noaux_tc",))
    config.require("scoring_func", ("sigmoid",))
    interleaved = config.get(bool, "rope_interleave")
    moe = read_mixture(config, read_groups(config, config.get(int, "n_routed_experts")))
    return read_latent(config, interleaved, moe=moe, mtp_layers=config.get(int, "num_nextn_predict_layers", 0))


def read_mixture(config: Config, grouped: GroupedRouting) -> MoeSpec:
    """The mixture of DeepSeek's models, dense layers first. Raises ValueError."""
    config.require("moe_layer_freq", (1,))
    config.require("ep_size", (1,))
    inner, dense = config.get(int, "moe_intermediate_size"), config.get(int, "first_k_dense_replace")
    return read_moe(
        config,
        config.get(int, "n_routed_experts"),
        inner,
        config.get(bool, "norm_topk_prob"),
        dense_layers=tuple(range(min(dense, config.num_layers))),
        grouped=grouped,
        shared_inner=inner * config.get(int, "n_shared_experts"),
    )


def read_latent(
    config: Config, interleaved: bool, changes: Mapping[str, Any] | None = None, **more: Any
) -> DecoderSpec:
    """A decoder with latent attention; `changes` are a model's own fields of LatentSpec, `more` of DecoderSpec."""
    heads, bias = config.get(int, "num_attention_heads"), config.get(bool, "attention_bias", False)
    latent = LatentSpec(
        latent=config.get(int, "kv_lora_rank"),
        query_rank=config.get(int, "q_lora_rank", 0),
        nope_dim=config.get(int, "qk_nope_head_dim"),
        rope_dim=config.get(int, "qk_rope_head_dim"),
        value_dim=config.get(int, "v_head_dim"),
        interleaved=interleaved,
        bias=bias,
        **changes or {},
    )
    for key, value, least in (
        ("kv_lora_rank", latent.latent, 1),
        ("qk_nope_head_dim", latent.nope_dim, 1),
        ("qk_rope_head_dim", latent.rope_dim, 1),
        ("v_head_dim", latent.value_dim, 1),
        ("q_lora_rank", latent.query_rank, 0),
    ):
        if not least <= value <= MOST["head_dim"]:
            raise ValueError(f"config: {key!r} is {value}, not between {least} and {MOST['head_dim']}")
    config.require("num_key_value_heads", (heads,))
    rope = read_rope(config, latent.rope_dim)
    if rope.rotary_dim != latent.rope_dim:
        raise ValueError(f"config: {rope.rotary_dim} of the {latent.rope_dim} numbers of 'qk_rope_head_dim' are turned")
    return read_decoder(
        config,
        latent=latent,
        num_kv_heads=heads,
        head_dim=latent.query_dim,
        rope=rope,
        attention_scale=latent.query_dim**-0.5 * attention_factor(rope),
        out_bias=bias,
        **more,
    )


def attention_factor(rope: RopeSpec) -> float:
    """On the scale, for a context stretched by YaRN: the square of 0.1 mscale_all_dim ln(factor) + 1 (arXiv 2309.00071,
    section 3.4, as DeepSeek's models were trained)."""
    scaling = dict(rope.scaling or {})
    weight = scaling.get("mscale_all_dim", 0.0)
    if rope.kind == "default" or not weight or scaling.get("factor", 1.0) <= 1:
        return 1.0
    return (0.1 * weight * log(scaling["factor"]) + 1.0) ** 2


MODEL = ModelDef(
    architectures=("DeepseekV3ForCausalLM",),
    features=(
        "multi-head latent attention",
        "mixture of experts in groups, shared experts, dense first layers",
        "rope: default, linear, yarn",
        "multi-token prediction",
    ),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
    prefixes={"model.layers.{n}.": None},  # the layer for multi-token prediction, where it is not asked for
)
