"""Mistral, also inside Mistral 3's multimodal checkpoints: Llama's layers, in some versions with a window."""

from services.worker.models.llama import NAMES
from services.worker.models.spec import LANGUAGE_PART, Config, DecoderSpec, ModelDef, read_decoder, read_windows


def read(config: Config) -> DecoderSpec:
    """Raises ValueError naming a value that is missing or not supported."""
    text = config.text
    return read_decoder(text, windows=read_windows(text))


MODEL = ModelDef(
    architectures=("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
    features=("grouped-query attention", "sliding window", "rope: default, linear, yarn", "text part of multimodal"),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
    prefixes=LANGUAGE_PART,
)
