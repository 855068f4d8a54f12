"""The Triton implementation of quantize_tensor against the op's meaning."""

from services.worker.kernels.impl.triton.quantize_tensor import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
