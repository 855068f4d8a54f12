"""AITER's implementation of rms_norm against the op's meaning."""

from services.worker.kernels.impl.aiter.rms_norm import IMPL
from tests.services.worker.kernels.impl.aiter.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
