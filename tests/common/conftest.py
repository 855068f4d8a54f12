"""The tokenizers that the tokenizer service's tests have, for what both it and the worker use."""

from tests.services.tokenizer.conftest import (
    sentencepiece_metadata,
    sentencepiece_model,
    smollm,
    smollm_metadata,
    smollm_words,
)

__all__ = ["sentencepiece_metadata", "sentencepiece_model", "smollm", "smollm_metadata", "smollm_words"]
