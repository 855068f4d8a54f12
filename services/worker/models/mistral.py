"""Mistral, also inside Mistral 3's multimodal checkpoints: Llama's layers, in some versions with a window."""

from services.worker.models.llama import NAMES, read
from services.worker.models.spec import LANGUAGE_PART, ModelDef

MODEL = ModelDef(
    architectures=("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
    features=("grouped-query attention", "sliding window", "rope: default, linear, yarn", "text part of multimodal"),
    read=read,
    names=NAMES,
    ignored=("rotary_emb.inv_freq",),
    prefixes=LANGUAGE_PART,
)
