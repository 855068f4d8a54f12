"""The Triton implementation of latent_write against the op's meaning."""

from services.worker.kernels.impl.triton.latent_write import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)
