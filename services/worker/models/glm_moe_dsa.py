"""GLM-5: DeepSeek-V3.2's sparse attention, with choices that several layers may share (arXiv 2603.12201)."""

from collections.abc import Mapping

from services.worker.models import deepseek_v32
from services.worker.models.deepseek_v32 import NAMES, read_sparse
from services.worker.models.spec import Config, DecoderSpec, ModelDef

# what transformers takes for keys that a configuration leaves out
DEFAULTS: Mapping[str, object] = {
    **deepseek_v32.DEFAULTS,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
    "rms_norm_eps": 1e-5,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}
FULL, SHARED = "full", "shared"


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    config = config.over(DEFAULTS)
    kinds = config.get(list, "indexer_types", []) or _kinds(config)
    if len(kinds) != config.num_layers or set(kinds) - {FULL, SHARED} or kinds[0] != FULL:
        raise ValueError(
            f"config: 'indexer_types' is {kinds!r} for {config.num_layers} layers, of which the first is full"
        )
    shared = tuple(kind == SHARED for kind in kinds) if SHARED in kinds else ()
    return read_sparse(config, interleaved=True, shared=shared)


def _kinds(config: Config) -> list[str]:
    """From a pattern of letters, or every so many layers behind the first ones."""
    if pattern := config.get(str, "index_topk_pattern", ""):
        return [{"F": FULL, "S": SHARED}.get(letter, letter) for letter in pattern]
    every, first = max(config.get(int, "index_topk_freq"), 1), config.get(int, "index_skip_topk_offset")
    return [SHARED if max(i - first + 1, 0) % every else FULL for i in range(config.num_layers)]


MODEL = ModelDef(
    architectures=("GlmMoeDsaForCausalLM",),
    features=(
        "multi-head latent attention to tokens that an indexer chooses, for several layers",
        "mixture of experts in groups, shared experts, dense first layers",
        "rope: default, linear, yarn",
        "multi-token prediction",
    ),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
    prefixes={"model.layers.{n}.": None},  # the layer for multi-token prediction, where it is not asked for
)
