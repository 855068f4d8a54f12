"""Qwen3-Next: gated DeltaNet in three layers of four, gated attention in the fourth; experts, one of them for all."""

from dataclasses import replace

from services.worker.models.delta_spec import DeltaNames, DeltaSpec
from services.worker.models.qwen3_moe import NAMES as QWEN3_MOE_NAMES
from services.worker.models.qwen3_moe import read_mixture
from services.worker.models.spec import FULL, MOST, Config, DecoderSpec, ModelDef, MtpNames, read_decoder

assert QWEN3_MOE_NAMES.experts is not None
NAMES = replace(
    QWEN3_MOE_NAMES,
    experts=replace(
        QWEN3_MOE_NAMES.experts,
        shared_gate_up=(
            "model.layers.{i}.mlp.shared_expert.gate_proj.weight",
            "model.layers.{i}.mlp.shared_expert.up_proj.weight",
        ),
        shared_down="model.layers.{i}.mlp.shared_expert.down_proj.weight",
        shared_gate="model.layers.{i}.mlp.shared_expert_gate.weight",
    ),
    delta=DeltaNames(
        qkvz="model.layers.{i}.linear_attn.in_proj_qkvz.weight",
        ba="model.layers.{i}.linear_attn.in_proj_ba.weight",
        conv="model.layers.{i}.linear_attn.conv1d.weight",
        decay="model.layers.{i}.linear_attn.A_log",
        decay_bias="model.layers.{i}.linear_attn.dt_bias",
        norm="model.layers.{i}.linear_attn.norm.weight",
        out="model.layers.{i}.linear_attn.out_proj.weight",
    ),
    mtp=MtpNames(
        embed_norm="mtp.pre_fc_norm_embedding.weight",
        hidden_norm="mtp.pre_fc_norm_hidden.weight",
        project="mtp.fc.weight",
        final_norm="mtp.norm.weight",
        stored={"mtp.layers.0.": "model.layers.{i}.", "mtp.": "mtp."},
    ),
)
LINEAR = "linear_attention"
# published configurations leave out what has transformers' default
DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 512,
}


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    config = config.over(DEFAULTS)
    bias = config.get(bool, "attention_bias", False)
    shared = config.get(int, "shared_expert_intermediate_size")
    if not 1 <= shared <= MOST["intermediate_size"]:
        raise ValueError(f"config: 'shared_expert_intermediate_size' is {shared}")
    return read_decoder(
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        attention_gate=True,
        norm_offset=1.0,
        delta=read_delta(config),
        moe=read_mixture(config, shared_inner=shared, shared_gate=True),
        mtp_layers=config.get(int, "num_nextn_predict_layers", 1),  # published configurations do not say it
    )


def read_delta(config: Config) -> DeltaSpec:
    every = config.get(int, "full_attention_interval", 4)
    if every < 1:
        raise ValueError(f"config: 'full_attention_interval' is {every}")
    usual = [LINEAR if (i + 1) % every else FULL for i in range(config.num_layers)]
    kinds = config.get(list, "layer_types", []) or usual
    if len(kinds) != config.num_layers:
        raise ValueError(f"config: 'layer_types' has {len(kinds)} entries for {config.num_layers} layers")
    if unknown := [kind for kind in kinds if kind not in (LINEAR, FULL)]:
        raise ValueError(f"config: 'layer_types' has {unknown[0]!r}, supported: {LINEAR}, {FULL}")
    if FULL not in kinds:
        raise ValueError(f"config: 'layer_types' has no {FULL}")
    sizes = {key: config.get(int, key) for key in DEFAULTS if key.startswith("linear_")}
    for key, size in sizes.items():
        if not 1 <= size <= MOST["head_dim"] or (key == "linear_conv_kernel_dim" and not 2 <= size <= 16):
            raise ValueError(f"config: {key!r} is {size}")
    keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    if values % keys:
        raise ValueError(f"config: {values} value heads cannot share {keys} key heads")
    return DeltaSpec(
        layers=tuple(i for i, kind in enumerate(kinds) if kind == LINEAR),
        heads=keys,
        values=values // keys,
        key_dim=sizes["linear_key_head_dim"],
        value_dim=sizes["linear_value_head_dim"],
        taps=sizes["linear_conv_kernel_dim"],
    )


MODEL = ModelDef(
    architectures=("Qwen3NextForCausalLM",),
    features=(
        "gated DeltaNet in most layers, with state instead of keys and values",
        "gated grouped-query attention in the others, partial rotary, query and key norm",
        "mixture of experts, and a gated shared expert",
        "rope: default, linear, yarn",
        "multi-token prediction",
    ),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
    prefixes={"mtp.": None},  # multi-token prediction, where it is not asked for
)
