"""The Triton implementation of sigmoid_gate against the op's meaning."""

from services.worker.kernels.impl.triton.sigmoid_gate import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
