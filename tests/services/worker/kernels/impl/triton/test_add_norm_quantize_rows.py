"""The Triton implementation of add_norm_quantize_rows against the op's meaning."""

from services.worker.kernels.impl.triton.add_norm_quantize_rows import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
