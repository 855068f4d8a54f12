"""The Triton implementation of moe_route_grouped against the op's meaning."""

from services.worker.kernels.impl.triton.moe_route_grouped import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
