"""The Triton implementation of fp8_weight_linear against the op's meaning."""

from services.worker.kernels.impl.triton.fp8_weight_linear import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder
from tests.services.worker.kernels.impl.triton.narrow import in_16_bits


def test_is_the_meaning(hold: Holder) -> None:
    hold(in_16_bits(IMPL))
