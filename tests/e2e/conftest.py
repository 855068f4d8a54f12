"""Systems that end-to-end tests share, each with two API and two tokenizer replicas."""

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.steered import Steered

REPLICAS = ("services.api.replicas=2", "services.tokenizer.replicas=2", "scheduler.max_rows=64", "kv.blocks=512")
EXACT = ("model.dtype=float32", "worker.threads=1")  # one thread: other systems are tested beside it


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: a file's tests stay together, and all that share the bundled model: its start is dear."""
    for item in items:
        group = "bundled" if "bundled" in getattr(item, "fixturenames", ()) else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def system() -> Iterator[Steered]:
    """What its worker says is no language, and costs next to nothing."""
    with Steered(*REPLICAS, "worker.kind=null", "worker.step_us=5000") as system:
        yield system


@pytest.fixture(scope="session")
def bundled() -> Iterator[Steered]:
    """The bundled model in the exact mode."""
    with Steered(*REPLICAS, *EXACT, "model.tool_parser=hermes") as system:
        yield system


@pytest.fixture
def client(bundled: Steered) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{bundled.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
