"""The Triton implementation of moe_mxfp4 against the op's meaning."""

from services.worker.kernels.impl.triton.moe_mxfp4 import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
