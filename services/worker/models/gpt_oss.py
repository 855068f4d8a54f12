"""gpt-oss: sinks in attention, a window in every other layer, a mixture with biases and a clamped gate, in MXFP4."""

from dataclasses import replace

from services.worker.kernels.ops.moe_clamped import LIMIT, SLOPE
from services.worker.models.llama import NAMES as LLAMA_NAMES
from services.worker.models.spec import (
    Config,
    DecoderSpec,
    ExpertNames,
    ExpertStack,
    ModelDef,
    read_decoder,
    read_moe,
    read_windows,
)

NAMES = replace(
    LLAMA_NAMES,
    sinks="model.layers.{i}.self_attn.sinks",
    experts=ExpertNames(
        router="model.layers.{i}.mlp.router.weight",
        gate_up=(
            "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
            "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
        ),
        down="model.layers.{i}.mlp.experts.{e}.down_proj.weight",
        stack=ExpertStack("model.layers.{i}.mlp.experts.gate_up_proj", "model.layers.{i}.mlp.experts.down_proj"),
    ),
)


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    config.require("swiglu_alpha", (SLOPE,))
    config.require("swiglu_limit", (LIMIT,))
    inner = config.get(int, "intermediate_size")
    moe = read_moe(config, config.get(int, "num_local_experts"), inner, True, clamped=True)
    attention_bias = config.get(bool, "attention_bias", True)
    windows = read_windows(config, lambda layer: layer % 2 == 0)
    return read_decoder(config, qkv_bias=attention_bias, out_bias=attention_bias, moe=moe, windows=windows, sinks=True)


MODEL = ModelDef(
    architectures=("GptOssForCausalLM",),
    features=(
        "mixture of experts with biases, clamped SwiGLU",
        "attention sinks",
        "sliding window in some layers",
        "MXFP4 experts",
        "rope: yarn",
    ),
    read=read,
    names=NAMES,
)
