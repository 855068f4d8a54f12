"""The Triton implementation of kv_write against the op's meaning."""

from services.worker.kernels.impl.triton.kv_write import IMPL
from services.worker.kernels.ops.kv_write import make_kv_case
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)


def test_scales_of_each_token_and_head(hold: Holder) -> None:
    hold(IMPL, cases=[make_kv_case(20, 3, 16, 3, 40, fp8=2), make_kv_case(1, 2, 16, 2, 64, fp8=2)])
