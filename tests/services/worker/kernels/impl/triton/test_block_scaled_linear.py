"""The Triton implementation of block_scaled_linear against the op's meaning."""

from services.worker.kernels.impl.triton.block_scaled_linear import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
