"""AITER's implementation of rope against the op's meaning."""

from services.worker.kernels.impl.aiter.rope import IMPL
from tests.services.worker.kernels.impl.aiter.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
