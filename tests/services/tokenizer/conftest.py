"""The bundled model's tokenizer, and tiny tokenizers of the other families."""

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer

from common import gguf_tokenizer, vocabulary
from common.config import Model
from common.gguf_metadata import read_gguf
from common.model_source import resolve
from common.vocabulary import Vocabulary
from services.tokenizer.source import Loaded, load

CORPUS = """Four services serve a real model, end to end, on any machine.
The quick brown fox jumps over the lazy dog; the dog does not mind, and says so in 1234 words.
    def take(self, batch):  # indented code with    runs of spaces
        return [token for token in batch if token >= 0]
Größe, naïve café, señor, Über, Straße, déjà vu, piñata. The end of the text, the end of the end.
""".splitlines()


@pytest.fixture(scope="session")
def smollm_metadata() -> dict[str, Any]:
    return dict(read_gguf(resolve("bundled").path).metadata)


@pytest.fixture(scope="session")
def smollm(smollm_metadata: dict[str, Any]) -> Tokenizer:
    return gguf_tokenizer.build(smollm_metadata)


@pytest.fixture(scope="session")
def smollm_words(smollm: Tokenizer) -> Vocabulary:
    return vocabulary.build(smollm)


@pytest.fixture(scope="session")
def sentencepiece_model() -> bytes:
    """A byte-fallback BPE model trained on CORPUS, as Llama 2 has it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture(scope="session")
def sentencepiece_metadata(sentencepiece_model: bytes) -> dict[str, Any]:
    """The same model as a GGUF file describes it."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    size = processor.get_piece_size()
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in range(size)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
    }


@pytest.fixture(scope="session")
def bundled() -> Loaded:
    return load(Model())


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="valence-") as folder:
        yield Path(folder)
