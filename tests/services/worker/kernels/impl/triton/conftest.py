"""Without a GPU these tests run Triton's kernels under its interpreter, on CPU tensors.

tests/conftest.py has Triton and the kernels' modules imported for that. Elsewhere in the process, and in its children,
nothing is interpreted: the variable is set only while tests are collected, and while those of this folder run.
"""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.conftest import HAS_GPU, interpreted
from tests.services.worker.kernels.impl.triton.hold import DTYPES, Holder

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]  # an operating system that has no Triton
elif not HAS_GPU:
    from tests.services.worker.kernels.impl.triton.interpreter import correct

    correct()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m on_device`: what says whether kernels are right on this device. The rest is for CI, whatever the machine."""
    for item in items:
        if isinstance(item, pytest.Function) and {"device", "hold"} & set(item.fixturenames):
            item.add_marker("on_device")


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with interpreted():
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where these tests' tensors live."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(
    scope="session", params=[[dtype] for dtype in DTYPES] if HAS_GPU else [DTYPES], ids=lambda dtypes: str(dtypes[0])
)
def hold(device: torch.device, request: pytest.FixtureRequest) -> Holder:
    """`hold(impl)`: every case of the op in every dtype, against its meaning.

    On a GPU a test per dtype: compiling takes longest, and several processes share it.
    """
    return Holder(device, request.param)
