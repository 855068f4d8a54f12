"""A little of each fuzzing, the same cases every time; `python -m tests.fuzz NAME` runs more of it."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from common.config import load
from common.errors import Reject
from tests.fuzz import core, files, http_bytes, links, settings, templates
from tests.fuzz.hostile_templates import BOUNDED, REFUSED
from tests.fuzz.processes import running


class Count:
    """Proves that the cases were run."""

    def __init__(self) -> None:
        self.cases = 0

    def __call__(self) -> None:
        self.cases += 1


@pytest.fixture
def count() -> Count:
    return Count()


def test_no_events_make_the_core_raise(count: Count) -> None:
    core.fuzz(300, 1, count)
    assert count.cases >= 300


def test_no_frames_end_a_process_or_harm_a_stream(count: Count) -> None:
    links.fuzz(750, 1, count)
    assert count.cases == 750


def test_a_flood_of_strangers_ends_nobody() -> None:
    with running() as system:
        links.flood(system, 2500)


def test_no_bytes_harm_the_listener(count: Count) -> None:
    statuses = asyncio.run(http_bytes.bombard(300, 1, count))
    assert count.cases >= 300
    assert {200, 400, 404, 405} <= statuses.keys()


def test_good_model_files_load(tmp_path: Path) -> None:
    """Else the odd ones would be refused for what all of them have."""
    config = load(None, ["worker.kernels=['torch']", "model.dtype=float32"])
    (tmp_path / "folder").mkdir()
    files.good_folder(tmp_path / "folder")
    (tmp_path / "file.gguf").write_bytes(files.good_gguf().encode())
    for name in ("folder", "file.gguf"):
        files.read_worker(tmp_path / name, config)
        files.read_tokenizer(tmp_path / name, config)


def test_odd_model_files_are_refused_by_name(count: Count) -> None:
    files.fuzz(250, 1, count)
    assert count.cases == 250


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_templates_are_refused(name: str) -> None:
    with pytest.raises(Reject):
        templates.render(REFUSED[name])


@pytest.mark.parametrize("name", BOUNDED)
def test_wasteful_templates_are_bounded(name: str) -> None:
    with contextlib.suppress(Reject):
        assert len(templates.render(BOUNDED[name], kwargs={"enable": 1})) <= templates.MAX_CHARS


def test_mixed_templates(count: Count) -> None:
    templates.fuzz(300, 1, count)
    assert count.cases == 300


def test_settings_and_keys(count: Count) -> None:
    settings.fuzz(100, 1, count)
    assert count.cases == 100
