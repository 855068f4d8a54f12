"""AITER's caches in one folder per content, the wheel's modules in it, tables merged like AITER's own merge."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker import aiter_cache
from services.worker.aiter_cache import (
    AiterCache,
    aiter_package,
    aiter_version,
    depends_on,
    link_modules,
    merge_tables,
    merged,
    rocm_version,
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed AITER that must not be imported."""
    folder = tmp_path / "site" / "aiter"
    for name in ("jit", "configs/model_configs"):
        (folder / name).mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('ROCm version file not found')")
    (folder / "jit" / "module_quant.so").write_text("of the wheel")
    info = folder.parent / "amd_aiter-0.1.20.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-aiter\nVersion: 0.1.20.post1\n")
    (info / "RECORD").write_text("aiter/__init__.py,sha256=a,1\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    yield folder
    assert "aiter" not in sys.modules


def test_all_caches_lie_in_one_folder_of_this_user(package: Path, tmp_path: Path) -> None:
    cache = AiterCache(tmp_path / "cache", "gfx942")
    cache.prepare()
    assert cache.folder.parent == tmp_path / "cache" / "aiter" and cache.folder.name.startswith("gfx942-")
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    environment = cache.environment
    assert environment["AITER_JIT_DIR"] == str(cache.folder / "jit")
    assert environment["AITER_ROOT_DIR"] == str(cache.folder / "root")
    assert environment["FLYDSL_RUNTIME_CACHE_DIR"] == str(cache.folder / "flydsl")
    assert environment["AITER_ENABLE_VSKIP"] == environment["AITER_AR_1STAGE"] == "0"
    assert json.loads((cache.folder / "content.json").read_text())["aiter"] == "0.1.20.post1"
    assert (cache.folder / "jit" / "module_quant.so").read_text() == "of the wheel"
    assert "AITER_ENABLE_VSKIP" not in AiterCache(tmp_path / "cache", "gfx950").environment


def test_another_content_is_another_folder(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = AiterCache(tmp_path, "gfx942").folder
    assert AiterCache(tmp_path, "gfx942").folder == before != AiterCache(tmp_path, "gfx950").folder
    monkeypatch.setattr(aiter_cache, "rocm_version", lambda: "7.2.4")
    after = AiterCache(tmp_path, "gfx942").folder
    assert after != before
    record = package.parent / "amd_aiter-0.1.20.dist-info" / "RECORD"
    record.write_text("aiter/__init__.py,sha256=b,1\n")  # another build of the same version
    assert AiterCache(tmp_path, "gfx942").folder not in (before, after)
    assert depends_on("gfx942").keys() == {"arch", "aiter", "files", "torch", "rocm", "python", "system"}


def test_a_folder_that_others_can_write_is_not_used(package: Path, tmp_path: Path) -> None:
    """Whoever can put a module there runs code in the worker."""
    cache = AiterCache(tmp_path, "gfx942")
    cache.folder.mkdir(parents=True)
    cache.folder.chmod(0o777)
    with pytest.raises(PermissionError, match="others can put code into"):
        cache.prepare()


def test_what_was_built_here_stays(tmp_path: Path) -> None:
    source, target = tmp_path / "wheel", tmp_path / "jit"
    source.mkdir()
    target.mkdir()
    for name in ("module_a", "module_b", "module_c"):
        (source / f"{name}.so").write_text("wheel")
    (target / "module_a.so").write_text("built")
    os.symlink(tmp_path / "gone.so", target / "module_b.so")  # of a wheel that has been removed
    assert link_modules(source, target) == 2 and link_modules(source, target) == 0
    assert [(target / f"module_{x}.so").read_text() for x in "abc"] == ["built", "wheel", "wheel"]


def test_versions(package: Path, tmp_path: Path) -> None:
    assert aiter_version() == "0.1.20.post1" and aiter_package() == package
    (tmp_path / ".info").mkdir()
    (tmp_path / ".info" / "version").write_text("7.2.0-43\n")
    assert rocm_version(tmp_path) == "7.2.0" and rocm_version(tmp_path / "nothing") == ""


GENERAL = "cu_num,M,N,K,libtype,us,tflops\n304,1,64,64,asm,9.0,1\n304,2,64,64,asm,8.0,1\n256,1,64,64,asm,7.0,1\n"
MODEL = "gfx,cu_num,M,N,K,libtype,us,tflops,_tag\ngfx942,304,1,64,64,triton,5.0,1,\ngfx942,304,1,64,64,asm,6.0,1,x\n"
UNTUNED = "M,N,K\n1,1,1\n"


def test_tables_are_merged_once_the_fastest_row_of_a_shape_counts(package: Path, tmp_path: Path) -> None:
    configs, target = package / "configs", tmp_path / "tables"
    target.mkdir()
    (configs / "bf16_tuned_gemm.csv").write_text(GENERAL)
    (configs / "bf16_untuned_gemm.csv").write_text(UNTUNED)
    (configs / "model_configs" / "bf16_tuned_gemm_some.csv").write_text(MODEL)
    (configs / "model_configs" / "bf16_untuned_gemm_some.csv").write_text("nonsense")
    (configs / "tuned_fmoe.csv").write_text("cu_num,token\n304,1\n")  # no model has one: AITER reads it as it is
    merge_tables(configs, target)
    assert os.listdir(target) == ["bf16_tuned_gemm.csv"]
    assert (target / "bf16_tuned_gemm.csv").read_text().splitlines() == [
        "cu_num,M,N,K,libtype,us,gfx,_tag,tflops",
        "304,1,64,64,triton,5.0,gfx942,,1",
        "304,2,64,64,asm,8.0,gfx942,,1",
        "256,1,64,64,asm,7.0,gfx950,,1",
        "304,1,64,64,asm,6.0,gfx942,x,1",
    ]
    (target / "bf16_tuned_gemm.csv").write_text("tuned by hand")
    merge_tables(configs, target)
    assert (target / "bf16_tuned_gemm.csv").read_text() == "tuned by hand"


def test_a_merged_table_is_named_to_aiter(package: Path, tmp_path: Path) -> None:
    cache = AiterCache(tmp_path, "gfx950")
    for name, text in (("a8w8_tuned_gemm", GENERAL), ("a8w8_untuned_gemm", UNTUNED)):
        (package / "configs" / f"{name}.csv").write_text(text)
    (package / "configs" / "model_configs" / "a8w8_tuned_gemm_m.csv").write_text(MODEL)
    cache.prepare()
    assert cache.environment["AITER_CONFIG_GEMM_A8W8"] == str(cache.folder / "tables" / "a8w8_tuned_gemm.csv")
    assert "AITER_CONFIG_FMOE" not in cache.environment


def test_columns_that_one_part_lacks() -> None:
    columns, rows = merged([[{"M": "1", "us": "2"}], [{"M": "1", "us": "nan?", "ksplit": "3"}]], ["M"])
    assert columns == ["M", "us", "ksplit"] and rows == [{"M": "1", "us": "2", "ksplit": "0"}]
