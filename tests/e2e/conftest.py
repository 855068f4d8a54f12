"""One running system for all end-to-end tests: the bundled model, two API and two tokenizer replicas, exact mode."""

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.steered import Steered


@pytest.fixture(scope="session")
def system() -> Iterator[Steered]:
    replicas = ("services.api.replicas=2", "services.tokenizer.replicas=2")
    one = "worker.threads=1"  # another system is tested beside it
    with Steered(*replicas, one, "scheduler.max_rows=64", "kv.blocks=512", "model.dtype=float32") as system:
        yield system


@pytest.fixture
def client(system: Steered) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
