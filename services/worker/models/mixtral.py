"""Mixtral: Mistral's attention; each layer's MLP is a mixture whose chosen experts' weights add up to 1."""

from dataclasses import replace

from services.worker.models.llama import NAMES as LLAMA_NAMES
from services.worker.models.spec import Config, DecoderSpec, ExpertNames, ModelDef, read_decoder, read_moe, read_windows

NAMES = replace(
    LLAMA_NAMES,
    experts=ExpertNames(
        router="model.layers.{i}.block_sparse_moe.gate.weight",
        gate_up=(
            "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
            "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
        ),
        down="model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
    ),
)


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    inner = config.get(int, "intermediate_size")
    moe = read_moe(config, config.get(int, "num_local_experts"), inner, renormalize=True)
    return read_decoder(config, moe=moe, windows=read_windows(config))


MODEL = ModelDef(
    architectures=("MixtralForCausalLM",),
    features=("mixture of experts", "grouped-query attention", "sliding window", "rope: default, linear, yarn"),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
)
