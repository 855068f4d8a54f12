"""The Triton implementation of shared_expert_gate against the op's meaning."""

from services.worker.kernels.impl.triton.shared_expert_gate import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
