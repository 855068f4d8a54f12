"""The command line as a person meets it. Mirrors valence/__main__.py."""

import subprocess
import sys
from pathlib import Path

import pytest


def valence(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "valence", *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def test_help_lists_the_commands_and_imports_little() -> None:
    script = (
        "import sys\nfrom valence import __main__\nsys.argv = ['valence', '--help']\n"
        "try:\n    __main__.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'zmq', 'httpx', 'asyncio', 'uvloop', 'supervisor'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    answer = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    for command in ("serve", "status", "restart", "scale", "stop", "chat", "models", "ops", "config", "logs", "bench"):
        assert command in answer.stdout
    assert "health" in answer.stdout and "fetch" in answer.stdout


def test_config_is_resolved_from_file_options_and_settings(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('[api]\nport = 9000\n[model]\nname = "mine"\n')
    text = valence("config", "--config", str(file), "--model", "some/model", "--set", "kv.blocks=77").stdout
    for line in ('model.source = "some/model"', 'model.name = "mine"', "api.port = 9000", "kv.blocks = 77"):
        assert line in text.splitlines()
    assert "api.port = 1234" in valence("config", "--config", str(file), "--port", "1234").stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (("serve", "--set", "modle.source=x"), 78, "unknown key modle; the nearest known key is model"),
        (("serve", "--model", "/no/such/model.gguf"), 78, "no model at /no/such/model.gguf"),
        (("serve", "--config", "/no/such.toml"), 78, "cannot read /no/such.toml"),
        (("status", "--run-dir", "/no/such/run"), 1, "no server is running in /no/such/run"),
        (("health", "--run-dir", "/no/such/run"), 1, "no process of /no/such/run with `--instance auto`"),
        (("chat", "--url", "http://127.0.0.1:1"), 1, "cannot talk to http://127.0.0.1:1"),
        (("bench", "nothing"), 1, "no benchmark 'nothing'"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], status: int, reason: str) -> None:
    answer = valence(*arguments)
    assert answer.returncode == status
    assert answer.stderr.startswith("valence: ")
    assert reason in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_fetch_says_where_a_model_is() -> None:
    answer = valence("fetch", "--model", "bundled")
    assert answer.returncode == 0 and Path(answer.stdout.strip()).is_file()
    answer = valence("fetch", "--model", "/no/such/model")
    assert (answer.returncode, answer.stdout) == (78, "") and "no model at /no/such/model" in answer.stderr


def test_version() -> None:
    assert valence("version").stdout.startswith("valence 0.")
