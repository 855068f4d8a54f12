"""Llama 2, 3 and later ones of the same layers; some files that call themselves so have a sliding window."""

from services.worker.models.spec import Config, DecoderNames, DecoderSpec, ModelDef, read_decoder, read_windows

NAMES = DecoderNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    input_norm="model.layers.{i}.input_layernorm.weight",
    qkv=(
        "model.layers.{i}.self_attn.q_proj.weight",
        "model.layers.{i}.self_attn.k_proj.weight",
        "model.layers.{i}.self_attn.v_proj.weight",
    ),
    out="model.layers.{i}.self_attn.o_proj.weight",
    post_norm="model.layers.{i}.post_attention_layernorm.weight",
    gate_up=("model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.mlp.up_proj.weight"),
    down="model.layers.{i}.mlp.down_proj.weight",
)


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    config = config.text
    config.require("pretraining_tp", (1,))
    attention_bias = config.get(bool, "attention_bias", False)
    return read_decoder(
        config,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=config.get(bool, "mlp_bias", False),
        windows=read_windows(config),
    )


MODEL = ModelDef(
    architectures=("LlamaForCausalLM",),
    features=("grouped-query attention", "tied and untied head", "rope: default, linear, llama3, yarn", "biases"),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
)
