import json
import math
from pathlib import Path

import pytest

from benchmarks.models import SHAPES, TINY, config_of, find_model, write_model
from benchmarks.published import PUBLISHED, Published
from benchmarks.shapes import LLAMA_8B, ModelShape
from common.config import Model
from services.tokenizer.source import load
from services.worker.loader import expected_shapes
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_worker_reads_what_is_published(name: str) -> None:
    """Of layers that are not all alike, every fourth or so attends to all; weights fit one GPU."""
    known: Published = PUBLISHED[name]
    config = json.loads((Path(find_model(name)) / "config.json").read_text())
    _, model = find_declaration(config["architectures"])
    spec = model.read(Config(config))
    shape = known.shape
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (shape.layers, shape.hidden, shape.vocab)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (shape.heads, shape.kv_heads, shape.head_dim)
    assert spec.moe is not None and (spec.moe.num_experts, spec.moe.inner) == (shape.experts, shape.inner)
    elements = sum(math.prod(shape) for shape in expected_shapes(spec, model.names).values())
    assert 75e9 < 2 * elements < 100e9
    if name == "mimo-cut":
        assert spec.windows == (0, 129, 129, 129, 129, 0, 129, 129) and spec.moe.dense_layers == (0,)
        assert (spec.value_dim, spec.window_kv_heads, spec.rope.rotary_dim) == (128, 8, 64)
        assert spec.local_rope is not None and (spec.rope.theta, spec.local_rope.theta) == (5e6, 1e4)
        assert [spec.has_sinks(layer) for layer in (0, 1, 5)] == [False, True, False] and spec.rms_eps == 1e-5
    else:
        assert spec.delta is not None and set(range(24)) - set(spec.delta.layers) == {3, 7, 11, 15, 19, 23}
        assert spec.rope.rotary_dim == 64 and spec.moe.renormalize


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
