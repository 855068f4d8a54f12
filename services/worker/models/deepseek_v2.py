"""DeepSeek-V2 and V2-Lite: latent attention, experts by softmax scores, in the best groups or among all."""

from collections.abc import Mapping
from dataclasses import replace

from services.worker.models.deepseek_v3 import NAMES, read_latent, read_mixture
from services.worker.models.glm4_moe import read_groups
from services.worker.models.spec import Config, DecoderSpec, GroupedRouting, ModelDef

# what transformers takes for keys that a configuration leaves out
DEFAULTS: Mapping[str, object] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "norm_topk_prob": False,
}


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    config = config.over(DEFAULTS)
    config.require("topk_method", ("greedy", "group_limited_greedy"))
    config.require("scoring_func", ("softmax",))
    config.require("norm_topk_prob", (False,))  # no published model has it, and implementations do not agree
    config.require("mlp_bias", (False,))
    experts = config.get(int, "n_routed_experts")
    if config.get(str, "topk_method") == "greedy":
        grouped = GroupedRouting(1, 1, config.get(float, "routed_scaling_factor"), softmax=True)
    else:
        grouped = replace(read_groups(config, experts), softmax=True)
    return read_latent(config, True, moe=read_mixture(config, grouped))


MODEL = ModelDef(
    architectures=("DeepseekV2ForCausalLM",),
    features=(
        "multi-head latent attention, with and without a latent of the query",
        "mixture of experts by softmax, in groups or not, shared experts, dense first layers",
        "rope: default, linear, yarn",
    ),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
)
