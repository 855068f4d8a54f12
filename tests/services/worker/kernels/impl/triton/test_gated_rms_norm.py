"""The Triton implementation of gated_rms_norm against the op's meaning."""

from services.worker.kernels.impl.triton.gated_rms_norm import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
