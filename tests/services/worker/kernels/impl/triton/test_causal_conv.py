"""The Triton implementation of causal_conv against the op's meaning."""

from services.worker.kernels.impl.triton.causal_conv import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
