"""Qwen3 dense: Llama's layers with an RMS norm on each query and key head."""

from dataclasses import replace

from services.worker.models.llama import NAMES as LLAMA_NAMES
from services.worker.models.qwen2 import windows_of
from services.worker.models.spec import Config, DecoderSpec, ModelDef, read_decoder

NAMES = replace(
    LLAMA_NAMES,
    q_norm="model.layers.{i}.self_attn.q_norm.weight",
    k_norm="model.layers.{i}.self_attn.k_norm.weight",
)


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    attention_bias = config.get(bool, "attention_bias", False)
    return read_decoder(
        config, qkv_bias=attention_bias, out_bias=attention_bias, qk_norm=True, windows=windows_of(config)
    )


MODEL = ModelDef(
    architectures=("Qwen3ForCausalLM",),
    features=(
        "grouped-query attention",
        "query and key norm",
        "tied and untied head",
        "sliding window",
        "rope: default, linear, yarn",
    ),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
)
