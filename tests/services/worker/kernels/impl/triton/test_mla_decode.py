"""The Triton implementation of mla_decode against the op's meaning."""

from services.worker.kernels.impl.triton.mla_decode import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
