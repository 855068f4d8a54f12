"""The Triton implementation of moe_row_scaled against the op's meaning."""

from services.worker.kernels.impl.triton.moe_row_scaled import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
