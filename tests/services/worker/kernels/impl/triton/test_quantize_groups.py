"""The Triton implementation of quantize_groups against the op's meaning."""

from services.worker.kernels.impl.triton.quantize_groups import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
