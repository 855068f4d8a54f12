"""The only file that reads the environment. Unknown VALENCE_* names are an error, so a typo never passes silently."""

import os
import sys
from pathlib import Path

from common.errors import ConfigError

KNOWN = {
    "VALENCE_CONFIG": "path of the TOML configuration file",
    "VALENCE_SET": "space-separated a.b=c settings, applied after the file",
    "VALENCE_API_KEYS": "keys that the API asks for: name=key or just a key, separated by commas or spaces",
    "VALENCE_ADMIN_KEYS": "the same, of keys that may also use administrative routes",
    "VALENCE_API_KEY": "the key that the command line sends to a server",
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


def interprets_triton() -> bool:
    """Whether Triton, which reads the same variable, runs its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def keep_compiled_in(folder: Path) -> None:
    """From now on inductor and Triton of this process, and of its children, keep what they compile in `folder`.

    Both read the environment at each use; neither has another switch that its compiling subprocesses follow.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
