"""Qwen2 and Qwen2.5 dense: Llama's layers with a bias on q, k and v."""

from services.worker.models.llama import NAMES
from services.worker.models.spec import Config, DecoderSpec, ModelDef, read_decoder


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    config.require("use_sliding_window", (False,))
    return read_decoder(config, qkv_bias=True)


MODEL = ModelDef(
    architectures=("Qwen2ForCausalLM",),
    features=("grouped-query attention", "q, k, v biases", "tied and untied head", "rope: default, linear, yarn"),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
)
