"""A builder in a child process, in the cache that a worker of that architecture will open."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.worker import prebuild as module
from services.worker.aiter_cache import AiterCache
from services.worker.prebuild import Step, prebuild

PACKAGE = """
import os, pathlib
def get_user_jit_dir():
    return os.environ["AITER_JIT_DIR"]
def get_args_of_build(name):
    return {"md_name": "", "srcs": []}
def build_module(md_name, srcs):
    print("compiler's words")
    assert os.environ["AITER_AOT_IMPORT"] == "1"
    place = pathlib.Path(get_user_jit_dir()) / f"{md_name}.so"
    place.write_text(os.environ["GPU_ARCHS"] + " " + os.environ["CU_NUM"])
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An AITER that is only a builder."""
    folder = tmp_path / "site" / "aiter"
    (folder / "jit").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "jit" / "__init__.py").touch()
    (folder / "jit" / "core.py").write_text(PACKAGE)
    (folder / "jit" / "optCompilerConfig.json").write_text('{"module_quant": {}, "module_rmsnorm": {}}')
    (folder / "jit" / "module_quant.so").write_text("of the wheel")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("PYTHONPATH", f"{folder.parent}:{Path(__file__).parents[3]}")
    yield folder
    sys.modules.pop("aiter", None)


def test_builds_for_each_architecture_where_its_workers_look(package: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    steps = list(prebuild(["gfx942", "gfx950"], ".*", root, lambda waited_s, holder: None))
    assert [(s.arch, s.module, s.state) for s in steps if s.arch == "gfx942"] == [
        ("gfx942", "module_quant", "there"),
        ("gfx942", "module_rmsnorm", "building"),
        ("gfx942", "module_rmsnorm", "built"),
    ]
    for arch, said in (("gfx942", "gfx942 304"), ("gfx950", "gfx950 256")):
        folder = AiterCache(root, arch).folder
        assert (folder / "jit" / "module_rmsnorm.so").read_text() == said
        assert "compiler's words" in (folder / "prebuild.log").read_text()


def test_a_builder_that_dies_is_a_failed_step(package: Path, tmp_path: Path) -> None:
    (package / "jit" / "core.py").write_text("raise RuntimeError('ROCm version file not found')")
    (step,) = prebuild(["gfx942"], ".*", tmp_path / "cache", lambda waited_s, holder: None)
    assert step.state == "failed" and "prebuild.log" in step.why
    assert "ROCm version file not found" in Path(step.why.rpartition(" ")[2]).read_text()


def test_what_cannot_be_built_is_said_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no architecture 'gfx1100' to build for; there are gfx942, gfx950"):
        list(prebuild(["gfx942", "gfx1100"], ".*", tmp_path, lambda waited_s, holder: None))
    monkeypatch.setattr(module, "aiter_package", lambda: None)
    with pytest.raises(ConfigError, match="AITER is not installed"):
        list(prebuild(["gfx942"], ".*", tmp_path, lambda waited_s, holder: None))
    assert Step("gfx942", "m", "built", 1, 2).why == ""
