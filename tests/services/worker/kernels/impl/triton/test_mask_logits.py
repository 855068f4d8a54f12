"""The Triton implementation of mask_logits against the op's meaning."""

from services.worker.kernels.impl.triton.mask_logits import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
