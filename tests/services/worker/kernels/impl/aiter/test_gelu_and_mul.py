"""AITER's implementation of gelu_and_mul against the op's meaning."""

from services.worker.kernels.impl.aiter.gelu_and_mul import IMPL
from tests.services.worker.kernels.impl.aiter.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
