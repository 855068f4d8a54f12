"""What a start builds into, and that it waits for locks that a live process holds."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import config as configuration
from services.worker import build_locks, builders
from services.worker.aiter_cache import AiterCache
from services.worker.build_locks import Presence, Turn
from services.worker.builders import Builders, cache_root, open_aiter, open_builders
from services.worker.compile_cache import MANIFEST, CompileCache

CONFIG = configuration.load(None, [])


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is set here goes again."""
    names = ("AITER_JIT_DIR", "AITER_ROOT_DIR", "FLYDSL_RUNTIME_CACHE_DIR", "AITER_ENABLE_VSKIP", "AITER_AR_1STAGE")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(build_locks, "WAIT_S", 0.01)
    yield
    for name in names:
        os.environ.pop(name, None)


def quiet(stage: str, done: int, total: int) -> None:
    """Nobody looks."""


def test_a_turn_seals_the_cache(tmp_path: Path) -> None:
    made = open_builders(CONFIG, CompileCache(tmp_path / "kernels", "key"), "sm_90")
    assert made.aiter is None and not made.is_ready()
    made = Builders(tmp_path, CompileCache(tmp_path / "kernels", "key"), None)
    with made.turn(quiet):
        assert not Turn(tmp_path).take(exclusive=False), "alone"
    assert made.is_ready() and (made.watched / MANIFEST).is_file()
    with made.turn(quiet):
        assert Turn(tmp_path).take(exclusive=False), "beside others"


def test_a_start_that_fails_seals_nothing_and_gives_its_turn_back(tmp_path: Path) -> None:
    made = Builders(tmp_path, CompileCache(tmp_path / "kernels", "key"), None)
    with pytest.raises(RuntimeError, match="no memory"), made.turn(quiet):
        raise RuntimeError("no memory")
    assert not made.is_ready() and Turn(tmp_path).take(exclusive=True)


def test_waiting_is_shown(tmp_path: Path) -> None:
    made, other = Builders(tmp_path, CompileCache(tmp_path / "kernels", "key"), None), Turn(tmp_path)
    assert other.take(exclusive=True)
    seen: list[tuple[str, int, int]] = []

    def stage(name: str, done: int, total: int) -> None:
        seen.append((name, done, total))
        if len(seen) == 3:
            other.end()

    with made.turn(stage):
        pass
    assert seen == [("another worker compiles", 0, 0)] * 3


def test_a_root_that_cannot_be_written_has_no_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    made = Builders(tmp_path / "file", CompileCache(tmp_path / "kernels", "key"), None)
    with made.turn(quiet):
        pass
    assert "no turns to compile" in caplog.text and made.is_ready()


def test_dead_locks_go_and_live_ones_are_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = AiterCache(tmp_path, "gfx942")
    cache.prepare()
    made = Builders(tmp_path, CompileCache(tmp_path / "kernels", "key"), cache)
    assert made.watched == cache.folder
    dead = cache.folder / "jit" / "build" / "lock_module_quant"
    dead.parent.mkdir()
    dead.touch()
    os.utime(dead, (1e9, 1e9))
    other = Presence(cache.folder)
    live = dead.with_name("lock_module_rmsnorm")
    live.touch()
    seen: list[str] = []

    def stage(name: str, done: int, total: int) -> None:
        seen.append(name)
        if len(seen) == 2:
            live.unlink()  # its build is done

    with made.turn(stage):
        assert not dead.exists() and not live.exists()
    other.end()
    assert seen == ["another build holds a lock"] * 2 and "lock_module_quant" in caplog.text


def test_aiter_is_led_into_our_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert open_aiter(CONFIG, "gfx942", tmp_path) is None, "it is not installed"
    monkeypatch.setattr(builders, "aiter_version", lambda: "0.1.20")
    assert open_aiter(CONFIG, "sm_90", tmp_path) is None
    without = configuration.load(None, ['worker.kernels=["triton", "torch"]'])
    assert open_aiter(without, "gfx942", tmp_path) is None and "AITER_JIT_DIR" not in os.environ
    monkeypatch.setenv("AITER_ROOT_DIR", "/image/aiter")
    cache = open_aiter(CONFIG, "gfx942", tmp_path)
    assert cache is not None and os.environ["AITER_JIT_DIR"] == str(cache.folder / "jit")
    assert os.environ["AITER_ROOT_DIR"] == "/image/aiter" and "AITER_ROOT_DIR as set from outside" in caplog.text
    assert os.environ["AITER_ENABLE_VSKIP"] == "0"


def test_a_cache_that_cannot_be_made_is_no_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builders, "aiter_version", lambda: "0.1.20")
    (tmp_path / "file").touch()
    assert open_aiter(CONFIG, "gfx942", tmp_path / "file") is None
    assert "AITER builds in a folder of its own" in caplog.text and "AITER_JIT_DIR" not in os.environ


def test_where_it_lies(tmp_path: Path) -> None:
    assert cache_root(configuration.load(None, [f"worker.cache_dir={tmp_path}"])) == tmp_path
    assert cache_root(CONFIG).name == "valence"
