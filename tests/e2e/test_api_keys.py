"""A server that asks for keys: OpenAI's client, the command line, two replicas, a key that is taken back."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from benchmarks.system import System
from valence.keys import add, remove

SECRET = "vl-from-the-environment"


@pytest.fixture(scope="module")
def keys_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "keys").touch()
        yield Path(folder) / "keys"


@pytest.fixture(scope="module")
def guarded(keys_file: Path) -> Iterator[System]:
    settings = ("worker.kind=null", "services.api.replicas=2", f"api.keys_file={keys_file}", "log.level=debug")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VALENCE_API_KEYS", f"env={SECRET}")
        with System(*settings) as system:
            yield system


def ask(system: System, key: str) -> str:
    """One request on a connection of its own, so that the replicas take turns."""
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        name = client.models.list().data[0].id
        stream = client.completions.create(model=name, prompt="hi", max_tokens=3, stream=True)
        return str([chunk.choices[0].finish_reason for chunk in stream][-1])


def test_keys_come_and_go_while_it_serves(guarded: System, keys_file: Path) -> None:
    assert guarded.ready()
    with pytest.raises(openai.AuthenticationError) as refused:
        ask(guarded, "vl-wrong")
    assert refused.value.code == "invalid_api_key"
    ann, bob = add(keys_file, "ann"), add(keys_file, "bob", per_minute=1)
    for key in (ann, SECRET):
        for _ in range(6):
            assert ask(guarded, key) == "length"
    with pytest.raises(openai.RateLimitError) as limited:
        [ask(guarded, bob) for _ in range(3)]  # the limit is each replica's own
    assert 0 < int(limited.value.response.headers["retry-after"]) <= 60
    remove(keys_file, "ann")
    for _ in range(6):
        with pytest.raises(openai.AuthenticationError):
            ask(guarded, ann)
    assert ask(guarded, SECRET) == "length"
    texts = []
    for path in guarded.run_dir.rglob("*"):
        with contextlib.suppress(OSError):  # no file, or a process has removed its own at its end
            texts.append(path.read_text(errors="replace"))
    assert any("limits of key bob" in text for text in texts)
    assert not any(key in text for key in (ann, bob, SECRET, "vl-wrong") for text in texts)
