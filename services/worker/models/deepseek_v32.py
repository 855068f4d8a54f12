"""DeepSeek-V3.2: V3 with sparse attention, in which an indexer chooses the tokens that a token attends to."""

from collections.abc import Mapping
from dataclasses import replace

from services.worker.models import deepseek_v3
from services.worker.models.deepseek_v3 import read_latent, read_mixture
from services.worker.models.glm4_moe import read_groups
from services.worker.models.spec import MOST, Config, DecoderSpec, ModelDef
from services.worker.models.spec_latent import IndexerSpec

assert deepseek_v3.NAMES.latent is not None
NAMES = replace(
    deepseek_v3.NAMES,
    latent=replace(
        deepseek_v3.NAMES.latent,
        index_q="model.layers.{i}.self_attn.indexer.wq_b.weight",
        index_k="model.layers.{i}.self_attn.indexer.wk.weight",
        index_k_norm="model.layers.{i}.self_attn.indexer.k_norm.weight",
        index_weights="model.layers.{i}.self_attn.indexer.weights_proj.weight",
    ),
)
# what transformers takes for keys that a configuration leaves out
DEFAULTS: Mapping[str, object] = {
    **deepseek_v3.DEFAULTS,
    "q_lora_rank": 1536,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    return read_sparse(config.over(DEFAULTS), interleaved=False)


def read_sparse(config: Config, interleaved: bool, shared: tuple[bool, ...] = ()) -> DecoderSpec:
    """`interleaved`, `shared`: of the indexer. Raises ValueError."""
    config.require("topk_method", ("noaux_tc",))
    config.require("scoring_func", ("sigmoid",))
    config.require("attention_bias", (False,))
    indexer = IndexerSpec(
        num_heads=config.get(int, "index_n_heads"),
        head_dim=config.get(int, "index_head_dim"),
        top_k=config.get(int, "index_topk"),
        interleaved=interleaved,
        shared=shared,
    )
    rotated = config.get(int, "qk_rope_head_dim")
    if not rotated <= indexer.head_dim <= MOST["head_dim"]:
        raise ValueError(f"config: 'index_head_dim' is {indexer.head_dim}, of which {rotated} are to be rotated")
    if not 1 <= indexer.num_heads <= MOST["num_heads"] or not 1 <= indexer.top_k <= MOST["max_position"]:
        raise ValueError(f"config: {indexer.num_heads} index heads that choose {indexer.top_k} tokens are not possible")
    if config.get(int, "q_lora_rank") < 1:
        raise ValueError("config: 'q_lora_rank' is 0: the indexer's queries are made of the query's latent")
    moe = read_mixture(config, read_groups(config, config.get(int, "n_routed_experts")))
    kinds = config.get(list, "mlp_layer_types", [])
    if kinds:
        if len(kinds) != config.num_layers or set(kinds) - {"dense", "sparse"}:
            raise ValueError(f"config: 'mlp_layer_types' has {kinds!r} for {config.num_layers} layers")
        moe = replace(moe, dense_layers=tuple(i for i, kind in enumerate(kinds) if kind == "dense"))
    heads = config.get(int, "num_nextn_predict_layers", 0)
    return read_latent(config, True, {"indexer": indexer}, moe=moe, mtp_layers=heads)


MODEL = ModelDef(
    architectures=("DeepseekV32ForCausalLM",),
    features=(
        "multi-head latent attention to tokens that an indexer chooses",
        "mixture of experts in groups, shared experts, dense first layers",
        "rope: default, linear, yarn",
        "multi-token prediction",
    ),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
    prefixes={"model.layers.{n}.": None},  # the layer for multi-token prediction, where it is not asked for
)
