"""Keys by content, broken folders, pruning."""

import os
from pathlib import Path
from typing import Any

import pytest

from services.worker.compile_cache import KEPT, MANIFEST, CompileCache, broken, content_key


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    root = tmp_path / "worker"
    for name in ("kernels/impl/x.py", "kernels/tuned/x.sm_90.json", "layers/y.py", "runner.py", "layers/y.pyc"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_the_key_follows_what_kernels_depend_on(sources: Path) -> None:
    model: dict[str, Any] = {"hidden_size": 8, "layers": 2}
    key = content_key("sm_90", model, sources)
    assert key == content_key("sm_90", {"layers": 2, "hidden_size": 8}, sources)
    (sources / "runner.py").write_text("changed")
    (sources / "layers/y.pyc").write_text("changed")
    assert key == content_key("sm_90", model, sources)
    others = [content_key("gfx942", model, sources), content_key("sm_90", model | {"layers": 3}, sources)]
    for name in ("kernels/impl/x.py", "kernels/tuned/x.sm_90.json", "layers/y.py"):
        (sources / name).write_text("changed")
        others.append(content_key("sm_90", model, sources))
    assert len({key, *others}) == 6


def test_our_own_sources_are_found() -> None:
    assert content_key("", {}) != content_key("", {}, Path("/nowhere"))


def fill(cache: CompileCache) -> Path:
    kernel = cache.folder / "triton" / "abc" / "kernel.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"code")
    (cache.folder / "inductor.lock").touch()
    return kernel


def test_a_sealed_folder_is_found_as_it_was(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, "k1")
    kernel = fill(cache)
    cache.seal()
    (cache.folder / "inductor.lock").unlink()
    later = cache.folder / "triton" / "later"
    later.write_bytes(b"compiled after the start")
    assert CompileCache(tmp_path, "k1").folder == cache.folder
    assert kernel.read_bytes() == b"code" and later.exists()


def test_a_start_that_was_interrupted_leaves_what_it_compiled(tmp_path: Path) -> None:
    kernel = fill(CompileCache(tmp_path, "k1"))
    CompileCache(tmp_path, "k1")
    assert kernel.exists()


@pytest.mark.parametrize("damage", ["shortened", "removed", "manifest"])
def test_a_broken_folder_is_made_anew(tmp_path: Path, damage: str) -> None:
    cache = CompileCache(tmp_path, "k1")
    kernel = fill(cache)
    cache.seal()
    if damage == "shortened":
        kernel.write_bytes(b"cod")
    elif damage == "removed":
        kernel.unlink()
    else:
        (cache.folder / MANIFEST).write_text('{"triton/abc')
    assert broken(cache.folder) is not None
    again = CompileCache(tmp_path, "k1")
    assert again.folder == cache.folder and list(again.folder.iterdir()) == []


def test_only_the_newest_folders_are_kept(tmp_path: Path) -> None:
    for number in range(KEPT + 2):
        folder = CompileCache(tmp_path, f"k{number}").folder
        os.utime(folder, (number, number))
    present = CompileCache(tmp_path, "k2").folder
    assert present == tmp_path / "k2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k2", "k3", "k4", "k5"]


def test_one_that_another_worker_removes_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(KEPT):
        os.utime(CompileCache(tmp_path, f"k{number}").folder, (number, number))
    rename = Path.rename

    def faster(path: Path, target: Path) -> Path:
        path.rmdir()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", faster)
    assert CompileCache(tmp_path, "new").folder == tmp_path / "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k1", "k2", "k3", "new"]


def test_a_folder_that_cannot_be_written_does_not_stop_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = CompileCache(tmp_path / "file", "k1")
    assert cache.folder.is_dir() and tmp_path not in cache.folder.parents
    cache.folder.rmdir()


def test_a_full_disk_does_not_stop_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompileCache(tmp_path, "k1")
    fill(cache)

    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    cache.seal()
    assert broken(cache.folder) is None and not (cache.folder / MANIFEST).exists()
