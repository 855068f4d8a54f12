"""The facts about this host that `valence doctor` judges. Changes nothing; what cannot be read is left out."""

import grp
import importlib.metadata
import os
import platform
import resource
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from common.config import Config
from common.errors import ConfigError
from common.run_dir import MAX_PATH, check_run_dir
from services.worker import build_locks, device_tools
from services.worker.aiter_cache import AiterCache, aiter_version, rocm_version
from services.worker.builders import cache_root
from services.worker.devices import Device
from valence.doctor import GIB, SERVED, UNLIMITED, Cache, Host, Limits, Node


def examine(config: Config) -> Host:
    """Everything but the ops (valence/doctor_ops.py adds them)."""
    root = cache_root(config)
    devices = device_tools.find_devices()
    arch = next((device.arch for device in devices if device.arch), "")
    caches, stale = _caches(root, arch)
    return Host(
        system=_system(),
        versions=_versions(),
        devices=devices,
        seen=_seen(),
        limits=_limits(),
        nodes=list(_nodes(devices)),
        groups=[_group(number) for number in sorted({os.getegid(), *os.getgroups()})],
        caches=caches,
        cache_free=_free(root),
        cache_trouble=_write_trouble(root),
        stale=stale,
        run_dir=str(config.run_dir),
        run_dir_trouble=_run_dir_trouble(config.run_dir),
    )


def _system() -> dict[str, str]:
    told = {}
    with suppress(OSError):
        told = platform.freedesktop_os_release()
    memory = psutil.virtual_memory()
    nodes = sum(1 for _ in Path("/sys/devices/system/node").glob("node[0-9]*"))
    boxed = " (in a container)" if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() else ""
    cpus = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    return {
        "system": f"{told.get('PRETTY_NAME', platform.system())}{boxed}",
        "kernel": platform.release(),
        "CPUs": f"{cpus} on {max(nodes, 1)} NUMA node{'s' if nodes > 1 else ''}",
        "memory": f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB free",
        "user": f"{os.geteuid()} ({'root' if os.geteuid() == 0 else 'not root'})",
    }


def _versions() -> dict[str, str]:
    found = {"valence": _installed("valence"), "python": sys.version.split()[0]}
    found |= {name: _installed(name) for name in ("torch", "triton")}
    found["triton"] = found["triton"] or _installed("pytorch-triton-rocm")
    found |= {"aiter": aiter_version(), "flydsl": _installed("flydsl"), "rocm": rocm_version()}
    found["amdgpu"] = _first_line(Path("/sys/module/amdgpu/version"))
    found["nvidia"] = _first_line(Path("/proc/driver/nvidia/version"))
    return found


def _installed(name: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


def _first_line(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().partition("\n")[0].strip()
    return ""


def _seen() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _limits() -> Limits:
    def hard(kind: int) -> int:
        limit = resource.getrlimit(kind)[1]
        return UNLIMITED if limit == resource.RLIM_INFINITY else limit

    return Limits(hard(resource.RLIMIT_NOFILE), hard(resource.RLIMIT_MEMLOCK), _total(Path("/dev/shm")))


def _nodes(devices: Sequence[Device]) -> Iterator[Node]:
    names = ["/dev/kfd"] if any(device.vendor == "amd" for device in devices) else []
    names += [device.render for device in devices if device.render]
    for name in names:
        with suppress(OSError):
            found = os.stat(name)
            usable = os.access(name, os.R_OK | os.W_OK)
            owner = f"{found.st_uid}:{_group(found.st_gid)}"
            yield Node(name, stat.filemode(found.st_mode), owner, found.st_gid, usable)


def _group(number: int) -> str:
    with suppress(KeyError):
        return grp.getgrgid(number).gr_name
    return str(number)


def _caches(root: Path, arch: str) -> tuple[list[Cache], list[str]]:
    """Folders of kernels, and stale locks among them."""
    found = [_cache("Triton and inductor", root / "kernels"), _cache("self-tests", root / "self-test")]
    stale: list[str] = []
    if arch in SERVED:
        present = AiterCache(root, arch).folder
        modules = sum(1 for _ in present.glob("jit/*.so"))
        found.append(_cache("AITER", present, f"{modules} modules"))
        others = build_locks.present_since(present)
        stale = [str(path) for path in build_locks.marks(present) if not others]
    return found, stale


def _cache(name: str, path: Path, note: str = "") -> Cache:
    size = files = 0
    for folder, _, names in os.walk(path):
        for each in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(folder, each)).st_size
                files += 1
    return Cache(name, str(path), size, files, note if files else "empty")


def _there(path: Path) -> Path:
    """The nearest folder above that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _free(path: Path) -> int:
    return shutil.disk_usage(_there(path)).free


def _total(path: Path) -> int:
    with suppress(OSError):
        return shutil.disk_usage(path).total
    return 0


def _write_trouble(path: Path) -> str:
    """Why nothing can be kept there."""
    place = _there(path)
    if not place.is_dir():
        return f"{place} is no folder"
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"


def _run_dir_trouble(path: Path) -> str:
    if len(str(path.absolute())) > MAX_PATH:
        return f"the run directory {path} is too long for a socket path"
    if not path.exists():
        return _write_trouble(path) and f"the run directory cannot be made: {_write_trouble(path)}"
    try:
        check_run_dir(path)
    except ConfigError as error:
        return str(error)
    return ""
