"""EG-MLA (arXiv 2509.16686): latent attention whose keys and values an embedding of the token gates; a smaller cache.

The paper: c = W_DKV h; kv = W_UKV c; g = W_UE E[id], E a table of each layer's own; [k; v] = LayerNorm(kv * g); a
rotated key beside it, as in DeepSeek-V2. No checkpoint and no code are published with it. Where it leaves details open
this file takes: one norm over all heads' keys and values, with weight and bias, eps 1e-5; DeepSeek's RMS norm of the
latent and its order of a head's numbers; a dense MLP; the names below; the key `gate_embedding_dim`.
"""

from dataclasses import replace

from services.worker.models.deepseek_v3 import NAMES as DEEPSEEK_NAMES
from services.worker.models.deepseek_v3 import read_latent
from services.worker.models.spec import MOST, Config, DecoderSpec, ModelDef

assert DEEPSEEK_NAMES.latent is not None
NAMES = replace(
    DEEPSEEK_NAMES,
    experts=None,
    latent=replace(
        DEEPSEEK_NAMES.latent,
        gate="model.layers.{i}.self_attn.gate_embed.weight",
        gate_up="model.layers.{i}.self_attn.gate_b_proj.weight",
        gated_norm="model.layers.{i}.self_attn.kv_layernorm.weight",
    ),
)


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    gate = config.get(int, "gate_embedding_dim")
    if not 1 <= gate <= MOST["hidden_size"]:
        raise ValueError(f"config: 'gate_embedding_dim' is {gate}, not between 1 and {MOST['hidden_size']}")
    return read_latent(config, config.get(bool, "rope_interleave", True), {"gate": gate})


MODEL = ModelDef(
    architectures=("EgMlaForCausalLM",),
    features=(
        "multi-head latent attention, keys and values gated by an embedding of the token",
        "rope: default, linear, yarn",
    ),
    read=read,
    names=NAMES,
)
