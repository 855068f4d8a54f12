"""Tiny checkpoints (tiny.py), each made once, and the least that a weight can be."""

from collections.abc import Callable

import pytest
import torch

from tests.services.worker import tiny as tiny_models
from tests.services.worker.tiny import Tiny


class PlainWeight:
    """The least that a `Weight` can be, so that these tests do not depend on any format."""

    format_name = "plain"
    fused = None

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.out_features, self.in_features = values.shape
        self.num_bytes = values.numel() * values.element_size()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = x @ self.values.T
        return product if bias is None else product + bias

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.values[ids.long()]

    def dequantize(self) -> torch.Tensor:
        return self.values.float()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """An engine of the test before took all cores; for tiny models their waking costs more than they do."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """By architecture, or by name of tiny.VARIANTS; each is made once."""
    made: dict[str, Tiny] = {}

    def make(name: str) -> Tiny:
        if name not in made:
            made[name] = tiny_models.make_tiny(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture
def tiny(make_tiny: Callable[[str], Tiny]) -> Tiny:
    return make_tiny("llama")


@pytest.fixture
def plain_weight() -> Callable[[torch.Tensor], PlainWeight]:
    return PlainWeight
