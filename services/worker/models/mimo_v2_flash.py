"""MiMo-V2-Flash: a window in most layers, with KV heads, sinks and a rope of their own; values smaller than keys."""

from dataclasses import replace

from services.worker.models.glm4_moe import NAMES as GLM_NAMES
from services.worker.models.glm4_moe import read_groups
from services.worker.models.spec import (
    FULL,
    MOST,
    SLIDING,
    Config,
    DecoderSpec,
    ModelDef,
    read_decoder,
    read_moe,
    read_rope,
    read_windows,
)

assert GLM_NAMES.experts is not None and GLM_NAMES.mtp is not None
NAMES = replace(
    GLM_NAMES,
    sinks="model.layers.{i}.self_attn.attention_sink_bias",
    experts=replace(GLM_NAMES.experts, shared_gate_up=("", ""), shared_down=""),
    mtp=replace(
        GLM_NAMES.mtp,
        final_norm="model.layers.{i}.final_layernorm.weight",
        stored={
            "model.mtp.layers.{h}.pre_mlp_layernorm.": "model.layers.{i}.post_attention_layernorm.",
            "model.mtp.layers.{h}.": "model.layers.{i}.",
            "model.mtp.": None,  # heads for tokens further ahead than drafts go
        },
        repeated=(),
    ),
)
# what transformers calls it: as published, and what 0 and 1 mean there
KINDS = {
    "layer_types": ("hybrid_layer_pattern", FULL, SLIDING),
    "mlp_layer_types": ("moe_layer_freq", "dense", "sparse"),
}
PARTIAL = 0.334  # of a head turns


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    config = unified(config)
    heads, head_dim = config.get(int, "num_attention_heads"), config.get(int, "head_dim")
    value_dim, scale = config.get(int, "v_head_dim", head_dim), config.get(float, "attention_value_scale")
    own_kv_heads = config.get(int, "swa_num_key_value_heads", 2 * config.get(int, "num_key_value_heads"))
    for key, usual in (("num_attention_heads", heads), ("head_dim", head_dim), ("v_head_dim", value_dim)):
        config.require(f"swa_{key}", (usual,))
    config.require("add_full_attention_sink_bias", (False,))
    config.require("n_shared_experts", (0,))
    config.require("scoring_func", ("sigmoid",))
    if own_kv_heads < 1 or heads % own_kv_heads:
        raise ValueError(f"config: {heads} query heads cannot share {own_kv_heads} KV heads")
    if not 1 <= value_dim <= MOST["head_dim"] or not 0 < scale < MOST["head_dim"]:
        raise ValueError(f"config: 'v_head_dim' is {value_dim}, 'attention_value_scale' is {scale}")
    windows = read_windows(config, even_if_wide=True)
    experts, mlps = config.get(int, "n_routed_experts"), config.get(list, "mlp_layer_types")
    return read_decoder(
        config,
        rope=read_rope(config, head_dim, FULL),
        local_rope=read_rope(config, head_dim, SLIDING) if windows else None,
        windows=windows,
        window_kv_heads=own_kv_heads if windows else 0,
        window_sinks=True,
        sinks=bool(windows) and config.get(bool, "add_swa_attention_sink_bias", True),
        value_dim=value_dim,
        value_scale=scale,
        qkv_bias=config.get(bool, "attention_bias", False),
        moe=read_moe(
            config,
            experts,
            config.get(int, "moe_intermediate_size"),
            config.get(bool, "norm_topk_prob", True),
            dense_layers=tuple(i for i, kind in enumerate(mlps) if kind == "dense"),
            grouped=read_groups(config, experts),
        ),
        mtp_layers=config.get(int, "num_nextn_predict_layers", 1),  # published configurations do not say it
        mtp_window=max(windows, default=0),
        mtp_dense=True,
    )


def unified(config: Config) -> Config:
    """As transformers writes it, from that or from what is published."""
    changes: dict[str, object] = {}
    for key, (published, zero, one) in KINDS.items():
        kinds = config.get(list, key, []) or [one if flag else zero for flag in config.get(list, published)]
        if len(kinds) != config.num_layers or not set(kinds) <= {zero, one}:
            raise ValueError(f"config: {key!r} is {kinds}, expected {zero} or {one} for each of {config.num_layers}")
        changes[key] = kinds
    if before := config.get(int, "sliding_window_size", 0):
        changes["sliding_window"] = before + 1  # counts tokens before the own one
    if not config.mapping("rope_parameters"):
        partial = config.get(float, "partial_rotary_factor", PARTIAL)
        thetas = {FULL: config.get(float, "rope_theta"), SLIDING: config.get(float, "swa_rope_theta", 10_000.0)}
        tables = {kind: {"rope_theta": theta, "partial_rotary_factor": partial} for kind, theta in thetas.items()}
        changes["rope_parameters"] = tables
    usual = {"rms_norm_eps": config.get(float, "layernorm_epsilon", 1e-5), "partial_rotary_factor": PARTIAL}
    return config.over(usual).changed(changes)


MODEL = ModelDef(
    architectures=("MiMoV2FlashForCausalLM",),
    features=(
        "sliding window in most layers, with KV heads, attention sinks and a rope of their own",
        "grouped-query attention, values smaller than keys and scaled",
        "mixture of experts in groups, dense first layers",
        "partial rotary; optional q, k, v biases",
        "rope: default, linear, yarn",
        "multi-token prediction",
    ),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
    prefixes={"model.mtp.": None},  # multi-token prediction, where it is not asked for
)
