"""The Triton implementation of keep_floor against the op's meaning."""

from services.worker.kernels.impl.triton.keep_floor import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
