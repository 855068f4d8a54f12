"""Gemma 3, alone or inside a multimodal checkpoint: norms before and after, windows with a rope of their own, GELU."""

from dataclasses import replace

from services.worker.models.llama import NAMES as LLAMA_NAMES
from services.worker.models.spec import (
    LANGUAGE_PART,
    MOST_ROPE,
    SLIDING,
    Config,
    DecoderSpec,
    ModelDef,
    RopeSpec,
    read_decoder,
    read_rope,
    read_windows,
)

NAMES = replace(
    LLAMA_NAMES,
    q_norm="model.layers.{i}.self_attn.q_norm.weight",
    k_norm="model.layers.{i}.self_attn.k_norm.weight",
    after_attention="model.layers.{i}.post_attention_layernorm.weight",
    post_norm="model.layers.{i}.pre_feedforward_layernorm.weight",
    after_mlp="model.layers.{i}.post_feedforward_layernorm.weight",
)
# published configurations leave out what has transformers' default
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    text = config.text.over(DEFAULTS)
    text.require("hidden_activation", ("gelu_pytorch_tanh",))
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        text.require(key, ())
    text.require("use_bidirectional_attention", (False,))
    head_dim, period = text.get(int, "head_dim"), text.get(int, "sliding_window_pattern")
    scalar = text.get(float, "query_pre_attn_scalar")
    if period < 1 or not 0 < scalar < MOST_ROPE:
        raise ValueError(f"config: 'sliding_window_pattern' is {period}, 'query_pre_attn_scalar' is {scalar}")
    local = RopeSpec(text.get(float, "rope_local_base_freq"), head_dim)
    if text.mapping("rope_parameters").get(SLIDING):
        local = read_rope(text, head_dim, SLIDING)
    has_bias = text.get(bool, "attention_bias", False)
    return read_decoder(
        text,
        activation="gelu_tanh",
        windows=read_windows(text, lambda i: (i + 1) % period > 0, even_if_wide=True),
        local_rope=local,
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        embed_scale=text.get(int, "hidden_size") ** 0.5,
        attention_scale=scalar**-0.5,
    )


MODEL = ModelDef(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    features=(
        "grouped-query attention",
        "sliding window in some layers, with a rope of their own",
        "query and key norm, norms before and after each part",
        "tied and untied head",
        "text part of multimodal",
        "rope: default, linear, yarn",
    ),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
    prefixes=LANGUAGE_PART,
)
