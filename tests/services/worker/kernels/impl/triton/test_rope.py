"""The Triton implementation of rope against the op's meaning."""

from services.worker.kernels.impl.triton.rope import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
