"""Qwen2 and Qwen2.5 dense: Llama's layers with a bias on q, k and v."""

from services.worker.models.llama import NAMES
from services.worker.models.spec import Config, DecoderSpec, ModelDef, read_decoder, read_windows


def windows_of(config: Config) -> tuple[int, ...]:
    """Qwen's layers from `max_window_layers` on have one, if any does."""
    first = config.get(int, "max_window_layers", 28)
    return read_windows(config, lambda i: i >= first) if config.get(bool, "use_sliding_window", False) else ()


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    return read_decoder(config, qkv_bias=True, windows=windows_of(config))


MODEL = ModelDef(
    architectures=("Qwen2ForCausalLM",),
    features=(
        "grouped-query attention",
        "q, k, v biases",
        "tied and untied head",
        "sliding window",
        "rope: default, linear, yarn",
    ),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
)
