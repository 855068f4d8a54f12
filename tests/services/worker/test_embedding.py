"""What a checkpoint's files say of its vectors, in the forms that sentence-transformers writes; and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import Model
from common.model_source import ModelFiles, resolve
from common.pooling import Embedding
from services.worker.embedding import embedding_of

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
MEAN = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


def found(
    folder: Path, modules: Any = None, pooling: Any = None, settings: Model | None = None, **config: Any
) -> Embedding:
    for path, values in ((folder / "modules.json", modules), (folder / "1_Pooling" / "config.json", pooling)):
        if values is not None:
            path.parent.mkdir(exist_ok=True)
            path.write_text(values if isinstance(values, str) else json.dumps(values))
    return embedding_of(settings or Model(), ModelFiles("folder", folder, "m"), config, 8)


def test_without_files(tmp_path: Path) -> None:
    assert found(tmp_path) == Embedding(8, "last", True, None)


@pytest.mark.parametrize(
    ("modules", "pooling", "mode", "normalize"),
    [
        ([TRANSFORMER, POOLING, NORMALIZE], LAST, "last", True),
        ([TRANSFORMER, POOLING], MEAN, "mean", False),
        (None, MEAN, "mean", True),
        ([TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode": "lasttoken"}, "last", True),
        ([TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode": ["mean"]}, "mean", True),
        ([TRANSFORMER, POOLING | {"type": "sentence_transformers.other.Pooling"}], MEAN, "mean", False),
        ([TRANSFORMER, POOLING, NORMALIZE], None, "last", True),
    ],
)
def test_files_of_sentence_transformers(tmp_path: Path, modules: Any, pooling: Any, mode: str, normalize: bool) -> None:
    made = found(tmp_path, modules, pooling)
    assert (made.size, made.mode, made.normalize) == (8, mode, normalize)


@pytest.mark.parametrize(
    ("modules", "pooling", "lacks"),
    [
        ([TRANSFORMER, POOLING, DENSE], MEAN, "Dense"),
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, "cls_token"),
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "mean_tokens"),
        ([TRANSFORMER, POOLING], {}, "nothing"),
        ([TRANSFORMER, POOLING | {"path": "../elsewhere"}], MEAN, "outside"),
        ([TRANSFORMER, POOLING | {"path": "/etc"}], MEAN, "outside"),
        ([TRANSFORMER, POOLING | {"path": "a\0b"}], MEAN, "outside"),
        ("[", MEAN, "cannot be read"),
        ({}, MEAN, "cannot be read"),
        ([TRANSFORMER, POOLING], "[1]", "cannot be read"),
        ([TRANSFORMER, POOLING], "[" * 100_000, "cannot be read"),
    ],
)
def test_what_is_not_computed_here_refuses_vectors_until_it_is_told(
    tmp_path: Path, modules: Any, pooling: Any, lacks: str
) -> None:
    made = found(tmp_path, modules, pooling)
    assert made.size == 0 and lacks in made.lacks and "model.pooling" in made.lacks
    assert found(tmp_path, settings=Model(pooling="last")) == Embedding(8, "last", True)


def test_settings_come_before_files(tmp_path: Path) -> None:
    made = found(tmp_path, [TRANSFORMER, POOLING], MEAN, Model(pooling="last", normalize="on"))
    assert (made.mode, made.normalize) == ("last", True)
    made = found(tmp_path, settings=Model(normalize="off"))
    assert (made.mode, made.normalize) == ("mean", False)


def test_lengths_that_vectors_may_be_cut_to(tmp_path: Path) -> None:
    assert found(tmp_path, matryoshka_dimensions=[6, 2]).lengths == (2, 6)
    assert found(tmp_path, is_matryoshka=True).lengths == ()
    assert found(tmp_path, settings=Model(matryoshka=True)).lengths == ()
    assert found(tmp_path, matryoshka_dimensions=["2"]).lengths is None


@pytest.mark.parametrize(
    ("number", "made"), [(0, "last"), (1, "mean"), (3, "last"), (2, "cls"), (4, "rank"), ([1], "last")]
)
def test_a_gguf_file_has_a_number(monkeypatch: pytest.MonkeyPatch, number: Any, made: str) -> None:
    file = type("File", (), {"metadata": {"general.architecture": "qwen3", "qwen3.pooling_type": number}})
    monkeypatch.setattr("services.worker.embedding.read_gguf", lambda path: file)
    told = embedding_of(Model(), ModelFiles("gguf", Path("m.gguf"), "m"), {}, 8)
    assert told == Embedding(8, made) if made in ("last", "mean") else made in told.lacks  # type: ignore[arg-type]


def test_the_bundled_model() -> None:
    assert embedding_of(Model(), resolve("bundled"), {}, 576) == Embedding(576)
