"""What is found on this host, and in its folders."""

import json
import stat
from pathlib import Path

import pytest

from common import config as configuration
from services.worker.aiter_cache import AiterCache
from services.worker.devices import Device
from valence import doctor_host
from valence.doctor import document, judge
from valence.doctor_host import examine

GPU = Device(0, "amd", "AMD Instinct MI300X", "gfx942", render="/dev/null")


def test_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_host.device_tools, "find_devices", list)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cubin").write_bytes(bytes(1000))
    config = configuration.load(None, [f"worker.cache_dir={tmp_path}", f"links.run_dir={tmp_path}/run"])
    host = examine(config)
    assert host.versions["torch"] and host.system["kernel"] and host.limits.shm != 0 and host.groups
    assert host.caches[0].size == 1000 and host.caches[0].files == 1 and host.cache_free > 0
    assert not host.cache_trouble and not host.run_dir_trouble and host.nodes == []
    json.dumps(document(host, judge(host)))


def test_caches_and_locks_of_the_present_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_host.device_tools, "find_devices", lambda: [GPU])
    cache = AiterCache(tmp_path, "gfx942")
    cache.prepare()
    (cache.folder / "jit" / "module_quant.so").write_text("built")
    (cache.folder / "jit" / "build").mkdir()
    (cache.folder / "jit" / "build" / "lock_module_quant").touch()
    host = examine(configuration.load(None, [f"worker.cache_dir={tmp_path}", f"links.run_dir={tmp_path}/run"]))
    (node,) = host.nodes  # /dev/kfd is not there
    assert (node.path, node.usable, node.mode[0]) == ("/dev/null", True, "c")
    assert host.caches[-1].note == "1 modules" and host.caches[-1].path == str(cache.folder)
    assert list(host.stale) == [str(cache.folder / "jit" / "build" / "lock_module_quant")]
    assert (cache.folder / "jit" / "build" / "lock_module_quant").exists(), "a doctor only looks"


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    long = tmp_path / ("x" * 100)
    open_to_all = tmp_path / "open"
    (open_to_all / "run").mkdir(parents=True)
    open_to_all.chmod(0o777)
    troubles = []
    for run_dir in (long, open_to_all / "run", tmp_path / "file" / "run"):
        settings = [f"worker.cache_dir={tmp_path}/file/cache", f"links.run_dir={run_dir}"]
        host = examine(configuration.load(None, settings))
        troubles.append(host.run_dir_trouble)
        assert host.cache_trouble == f"{tmp_path}/file is no folder"
    assert "too long" in troubles[0] and str(open_to_all) in troubles[1] and "cannot be made" in troubles[2]
    assert stat.S_IMODE(open_to_all.stat().st_mode) == 0o777
