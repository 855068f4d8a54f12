"""The only file that reads the environment. Unknown VALENCE_* names are an error, so a typo never passes silently."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from common.errors import ConfigError

KNOWN = {
    "VALENCE_CONFIG": "path of the TOML configuration file",
    "VALENCE_SET": "space-separated a.b=c settings, applied after the file",
    "VALENCE_API_KEYS": "keys that the API asks for: name=key or just a key, separated by commas or spaces",
    "VALENCE_ADMIN_KEYS": "the same, of keys that may also use administrative routes",
    "VALENCE_API_KEY": "the key that the command line sends to a server",
}
# Which GPUs a process sees: the innermost list first, whose entries count in what the outer ones leave.
DEVICE_LISTS = {
    "amd": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
}
FOR_SERVICES = {"VALENCE_API_KEYS", "VALENCE_ADMIN_KEYS"}  # secrets: they reach the API in no file, and nobody else


def check() -> None:
    """Raises ConfigError for a VALENCE_* variable that nothing reads."""
    unknown = sorted(name for name in os.environ if name.startswith("VALENCE_") and name not in KNOWN)
    if unknown:
        raise ConfigError(f"unknown environment variable {unknown[0]}; known are {', '.join(KNOWN)}")


def config_path() -> str:
    return os.environ.get("VALENCE_CONFIG", "")


def settings() -> list[str]:
    return os.environ.get("VALENCE_SET", "").split()


def api_keys() -> str:
    return os.environ.get("VALENCE_API_KEYS", "")


def admin_keys() -> str:
    return os.environ.get("VALENCE_ADMIN_KEYS", "")


def api_key() -> str:
    return os.environ.get("VALENCE_API_KEY", "")


def child_environment(threads: int) -> dict[str, str]:
    """The environment of a service process: everything of ours, BLAS threads bounded to `threads` (0: not bounded)."""
    environment = dict(os.environ)
    for name in KNOWN.keys() - FOR_SERVICES:
        environment.pop(name, None)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["TOKENIZERS_PARALLELISM"] = "false"
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys():
        # GNU OpenMP spins for milliseconds by itself: on shared cores threads then wait for each other's spinning.
        environment["GOMP_SPINCOUNT"] = "20000"
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def bare_environment() -> dict[str, str]:
    """For a process that needs Python and our code, and shall have nothing else: no keys, no tokens, no proxies."""
    kept = {name: os.environ[name] for name in ("PATH", "TZ", "LANG", "LC_ALL", "VIRTUAL_ENV") if name in os.environ}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def user_cache() -> Path:
    """This user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "valence"


def user_data() -> Path:
    """This user's folder for what cannot be made again."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "valence"


def interprets_triton() -> bool:
    """Whether Triton, which reads the same variable, runs its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def keep_compiled_in(folder: Path) -> None:
    """From now on inductor and Triton of this process, and of its children, keep what they compile in `folder`.

    Both read the environment at each use; neither has another switch that its compiling subprocesses follow.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")


def show_devices(vendor: Literal["amd", "nvidia"], wanted: Sequence[int], count: int) -> str | None:
    """From now on this process and its children see the `wanted` ones of the GPUs that it may see, of `count`.

    Returns the setting that says so, or None where not all of them are. Before torch is imported: the runtimes read
    the variables once.
    """
    names = DEVICE_LISTS[vendor]
    name = next((name for name in names if name in os.environ), names[-1])
    given = os.environ.get(name)
    listed = [str(i) for i in range(count)] if given is None else [entry.strip() for entry in given.split(",")]
    shown = [listed[number] for number in wanted if number < len(listed) and listed[number]]
    if len(shown) < len(wanted):
        return None
    if given is None and vendor == "nvidia":
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as the kernel lists them, not the fastest first
    os.environ[name] = ",".join(shown)
    return f"{name}={os.environ[name]}"


def set_defaults(variables: Mapping[str, str]) -> dict[str, str]:
    """Sets variables of libraries that nobody has set; returns what is in force for each."""
    return {name: os.environ.setdefault(name, value) for name, value in variables.items()}


def is_set(name: str) -> bool:
    """Whether a variable of a library has a value."""
    return name in os.environ


def with_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a child that needs some of a library's variables to be others."""
    return {**os.environ, **variables}
