"""The Triton implementation of silu_quantize_groups against the op's meaning."""

from services.worker.kernels.impl.triton.silu_quantize_groups import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
