"""The Triton implementation of index_scores against the op's meaning."""

from services.worker.kernels.impl.triton.index_scores import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
