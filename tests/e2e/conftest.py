"""Systems that end-to-end tests share, each with two API and two tokenizer replicas."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.steered import Steered

REPLICAS = ("services.api.replicas=2", "services.tokenizer.replicas=2", "scheduler.max_rows=64", "kv.blocks=512")
EXACT = ("model.dtype=float32", "worker.threads=1")  # one thread: other systems are tested beside it


# Files whose tests share `bundled`: one process runs them, since the model's start is dear.
SHARING = {
    f"tests/e2e/test_{name}.py" for name in ("beams", "fields", "metrics", "openai", "speculative", "structured")
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, but for SHARING. Its `loadgroup` does nothing with pytest 9.2, which has other node ids."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "bundled" if file in SHARING else file

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


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
