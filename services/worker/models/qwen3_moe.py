"""Qwen3 with experts: Qwen3's attention; layers may be mixed, with an ordinary MLP in some."""

from dataclasses import replace
from typing import Any

from services.worker.models.qwen3 import NAMES as QWEN3_NAMES
from services.worker.models.spec import (
    Config,
    DecoderSpec,
    ExpertNames,
    ModelDef,
    MoeSpec,
    read_decoder,
    read_moe,
    read_windows,
)

NAMES = replace(
    QWEN3_NAMES,
    experts=ExpertNames(
        router="model.layers.{i}.mlp.gate.weight",
        gate_up=(
            "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
            "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
        ),
        down="model.layers.{i}.mlp.experts.{e}.down_proj.weight",
    ),
)


def read_mixture(config: Config, **changes: Any) -> MoeSpec:
    """The mixture, and which layers have it; `changes` as in read_moe. Raises ValueError."""
    # transformers 5 writes num_local_experts, those before it num_experts
    count = config.get(int, "num_experts", 0) or config.get(int, "num_local_experts")
    step = config.get(int, "decoder_sparse_step", 1)
    if step < 1:
        raise ValueError(f"config: 'decoder_sparse_step' is {step}, expected at least 1")
    plain = config.get(list, "mlp_only_layers", [])
    dense_layers = tuple(i for i in range(config.num_layers) if i in plain or (i + 1) % step)
    inner, renormalize = config.get(int, "moe_intermediate_size"), config.get(bool, "norm_topk_prob", False)
    return read_moe(config, count, inner, renormalize, dense_layers=dense_layers, **changes)


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    attention_bias = config.get(bool, "attention_bias", False)
    windows = read_windows(config) if config.get(bool, "use_sliding_window", False) else ()
    return read_decoder(
        config,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        qk_norm=True,
        moe=read_mixture(config),
        windows=windows,
    )


MODEL = ModelDef(
    architectures=("Qwen3MoeForCausalLM",),
    features=(
        "mixture of experts",
        "grouped-query attention",
        "query and key norm",
        "sliding window",
        "rope: default, linear, yarn",
    ),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
)
