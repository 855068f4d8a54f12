"""GLM-4.5 and later mixtures: half of a head turns, experts in groups by corrected sigmoid scores, and a shared one."""

from dataclasses import replace

from services.worker.models.llama import NAMES as LLAMA_NAMES
from services.worker.models.spec import (
    Config,
    DecoderSpec,
    ExpertNames,
    GroupedRouting,
    ModelDef,
    MtpNames,
    read_decoder,
    read_moe,
)

NAMES = replace(
    LLAMA_NAMES,
    q_norm="model.layers.{i}.self_attn.q_norm.weight",
    k_norm="model.layers.{i}.self_attn.k_norm.weight",
    experts=ExpertNames(
        router="model.layers.{i}.mlp.gate.weight",
        correction="model.layers.{i}.mlp.gate.e_score_correction_bias",
        gate_up=(
            "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
            "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
        ),
        down="model.layers.{i}.mlp.experts.{e}.down_proj.weight",
        shared_gate_up=(
            "model.layers.{i}.mlp.shared_experts.gate_proj.weight",
            "model.layers.{i}.mlp.shared_experts.up_proj.weight",
        ),
        shared_down="model.layers.{i}.mlp.shared_experts.down_proj.weight",
    ),
    mtp=MtpNames(
        embed_norm="model.layers.{i}.enorm.weight",
        hidden_norm="model.layers.{i}.hnorm.weight",
        project="model.layers.{i}.eh_proj.weight",
        final_norm="model.layers.{i}.shared_head.norm.weight",
        repeated=("model.layers.{i}.embed_tokens.weight", "model.layers.{i}.shared_head.head.weight"),
    ),
)


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    config = config.over({"partial_rotary_factor": 0.5})
    experts = config.get(int, "n_routed_experts", 0) or config.get(int, "num_local_experts")
    inner = config.get(int, "moe_intermediate_size")
    moe = read_moe(
        config,
        experts,
        inner,
        config.get(bool, "norm_topk_prob", True),
        dense_layers=tuple(range(min(config.get(int, "first_k_dense_replace", 1), config.num_layers))),
        grouped=read_groups(config, experts),
        shared_inner=inner * config.get(int, "n_shared_experts", 1),
    )
    return read_decoder(
        config,
        qkv_bias=config.get(bool, "attention_bias", False),
        qk_norm=config.get(bool, "use_qk_norm", False),
        moe=moe,
        mtp_layers=config.get(int, "num_nextn_predict_layers", 0),
    )


def read_groups(config: Config, experts: int) -> GroupedRouting:
    groups, best = config.get(int, "n_group", 1), config.get(int, "topk_group", 1)
    if groups < 1 or experts % groups or experts < 2 * groups or not 1 <= best <= groups:
        raise ValueError(f"config: {best} of {groups} groups of {experts} experts are not possible")
    if config.get(int, "num_experts_per_tok") > best * experts // groups:
        raise ValueError("config: 'num_experts_per_tok' is more than the chosen groups have")
    return GroupedRouting(groups, best, config.get(float, "routed_scaling_factor", 1.0))


MODEL = ModelDef(
    architectures=("Glm4MoeForCausalLM",),
    features=(
        "mixture of experts in groups, a shared expert, dense first layers",
        "grouped-query attention",
        "partial rotary",
        "optional query and key norm, q, k, v biases",
        "rope: default, linear, yarn",
        "multi-token prediction",
    ),
    read=read,
    names=NAMES,
    prefixes={"model.layers.{n}.": None},  # the layer for multi-token prediction, where it is not asked for
)
