"""Each line of the Dockerfile runs: images for AMD and NVIDIA are built, on stand-ins where a base is not to be had.

The daemon's own builder runs every stage before the one that is asked for, so the last target runs them all. What no
stand-in shows is AITER's build, and that ROCm's and CUDA's torch load.
"""

import json
import tempfile
from pathlib import Path

import pytest

from tests.compose import daemon
from tests.compose.composefile import ROOT

STANDIN = Path(__file__).with_name("standin")
FOUND = """
import importlib.metadata as m, json, os, aiter, torch, services.worker, valence
own = [m.version("amd-aiter"), m.version("torch"), torch.version.hip]
print(json.dumps([*own, m.version("uvloop") != "", os.getuid()]))
"""


def built(docker: dict[str, str], target: str, **arguments: str) -> str:
    """The image's name. By Compose, whose layers test_up.py finds again: another client's are not the same."""
    image = f"valence-test-{target}"
    arguments |= {name: docker[name] for name in ("PYTHON_BASE", "TORCH_INDEX")}
    build = {"context": str(ROOT), "dockerfile": "deploy/Dockerfile", "target": target, "args": arguments}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump({"services": {"one": {"image": image, "build": build}}}, file)  # which is YAML, too
        file.flush()
        daemon.run(*daemon.compose(docker), "-f", file.name, "-p", image, "build", env=docker)
    return image


def said(docker: dict[str, str], image: str, *command: str) -> str:
    run = ("docker", "run", "--rm", "--read-only", "--network", "none", "--entrypoint", command[0], image)
    return daemon.run(*run, *command[1:], env=docker).stdout


def standin(docker: dict[str, str], hip: str) -> str:
    """Python with a torch that says `hip` of itself, AITER's repository, and none of our own."""
    image = f"valence-test-base-{'rocm' if hip != 'None' else 'cuda'}"
    options = (f"BASE={built(docker, 'cpu-environment')}", f"HIP={hip}")
    arguments = (word for option in options for word in ("--build-arg", option))
    daemon.run("docker", "build", "-q", "-t", image, *arguments, str(STANDIN), env=docker)
    return image


def build_for_amd(docker: dict[str, str], base: str) -> str:
    return built(docker, "worker-rocm", ROCM_BASE=base, AITER_REPOSITORY="/standin/aiter", AITER_COMMIT="main")


def test_the_worker_for_amd(docker: dict[str, str]) -> None:
    """AITER's stage builds a wheel, the base's torch stays, what is missing is installed, and the user is nobody."""
    base = standin(docker, "'7.2.0'")
    torch = said(docker, base, "python3", "-c", "import importlib.metadata as m; print(m.version('torch'))").strip()
    answer = json.loads(said(docker, build_for_amd(docker, base), "python3", "-c", FOUND))
    assert answer == ["0.0.0", torch, "7.2.0", True, 10001]


def test_a_base_without_rocm_is_refused(docker: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="the build for ROCm was replaced"):
        build_for_amd(docker, standin(docker, "None"))


def test_the_worker_for_nvidia(docker: dict[str, str]) -> None:
    """A compiler for launchers, and torch as the index gives it (for CPUs, where only that is at hand)."""
    image = built(docker, "worker-nvidia")
    assert said(docker, image, "gcc", "--version")
    assert (
        said(docker, image, "python3", "-c", "import torch, services.worker, os; print(os.getuid())").strip() == "10001"
    )
