from pathlib import Path

import pytest

from benchmarks.models import SHAPES, TINY, config_of, find_model, write_model
from benchmarks.shapes import LLAMA_8B, ModelShape
from common.config import Model
from services.tokenizer.source import load
from services.worker.models.registry import find_model as find_declaration
from services.worker.models.spec import Config


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: str(shape.name))
def test_the_worker_reads_the_same_shape(shape: ModelShape) -> None:
    config = config_of(shape, 200_000)
    _, model = find_declaration(config["architectures"])
    spec = model.read(Config(config))
    assert (spec.num_layers, spec.hidden_size) == (shape.layers, shape.hidden)
    if shape.experts:
        assert spec.moe is not None and not spec.moe.dense_layers and spec.moe.renormalize
        assert (spec.moe.num_experts, spec.moe.top_k, spec.moe.inner) == (shape.experts, shape.top_k, shape.inner)
    else:
        assert spec.intermediate_size == shape.inner
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (shape.heads, shape.kv_heads, shape.head_dim)
    assert (spec.vocab_size, spec.qk_norm, spec.tie_embeddings) == (shape.vocab, shape.qk_norm, shape.tie)
    assert spec.max_position == 200_000


def test_every_token_has_its_text(tmp_path: Path) -> None:
    loaded = load(Model(source=str(write_model(tmp_path, TINY))))
    words = loaded.vocabulary
    assert words.size == TINY.vocab and all(words.pieces)
    text = "abcdefgh"
    ids = loaded.tokenizer.encode(text).ids
    assert len(ids) < len(text) and words.decode(ids) == text
    assert len({words.pieces[token] for token in range(words.size)}) == words.size
    assert loaded.template is not None


def test_names_are_made_and_sources_stay() -> None:
    assert Path(find_model("tiny")).name == "Tiny" and Path(find_model("tiny", 9000)).name == "Tiny-9000"
    assert find_model("owner/name") == "owner/name"
    assert config_of(LLAMA_8B)["rope_scaling"]["rope_type"] == "llama3"
