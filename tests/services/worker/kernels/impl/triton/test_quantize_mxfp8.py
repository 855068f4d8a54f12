"""The Triton implementation of quantize_mxfp8 against the op's meaning."""

from services.worker.kernels.impl.triton.quantize_mxfp8 import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
