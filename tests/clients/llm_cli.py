"""Simon Willison's `llm` with extra-openai-models.yaml: `pip install llm`; see tests/clients/checks.py."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.checks import MODEL, WEATHER, run

KINDS: dict[str, dict[str, Any]] = {"chat": {}, "completion": {"completion": True}, "responses": {"responses": True}}


def ask(url: str, kind: str, *arguments: str) -> str:
    """What the command prints; its database and settings are in a folder that is thrown away."""
    model = {"model_id": "here", "model_name": MODEL, "api_base": f"{url}/v1", "supports_schema": True}
    with tempfile.TemporaryDirectory() as folder:
        # JSON is YAML
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model | KINDS[kind]]))
        command = [sys.executable, "-m", "llm", "-m", "here", *arguments]
        done = subprocess.run(command, env=os.environ | {"LLM_USER_PATH": folder}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        logged = json.loads(
            subprocess.run(
                [sys.executable, "-m", "llm", "logs", "--json"],
                env=os.environ | {"LLM_USER_PATH": folder},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        # of completions it keeps what came, but does not count
        assert kind == "completion" or logged[0]["output_tokens"], logged
    return done.stdout


def chat(url: str) -> None:
    asked = ("-o", "max_tokens", "4", "-o", "temperature", "0", "What is the capital of France?")
    assert ask(url, "chat", *asked).strip() == ask(url, "chat", "--no-stream", *asked).strip() != ""


def completion(url: str) -> None:
    assert ask(url, "completion", "-o", "max_tokens", "4", "One, two,").strip()


def responses(url: str) -> None:
    assert ask(url, "responses", "-o", "max_tokens", "16", "Hello").strip()


def structured(url: str) -> None:
    text = ask(url, "chat", "-o", "max_tokens", "40", "--schema", json.dumps(WEATHER), "Where is it?")
    assert json.loads(text)["city"] in ("Rome", "Oslo")


if __name__ == "__main__":
    sys.exit(run("llm", chat, completion, responses, structured))
