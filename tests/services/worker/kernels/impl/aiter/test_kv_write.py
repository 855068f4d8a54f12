"""AITER's writing of pages against the op's meaning, in both layouts."""

from services.worker.kernels.impl.aiter.kv_write import IMPL
from tests.services.worker.kernels.impl.aiter.cases import KV_WRITE
from tests.services.worker.kernels.impl.aiter.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    called = hold(IMPL)
    assert {calls[0] for name, calls in called.items() if "e4048607" in name and calls} == {"reshape_and_cache"}
    assert {calls[0] for name, calls in called.items() if "0.1.7" in name and calls} == {"reshape_and_cache_flash"}


def test_of_other_shapes(hold: Holder) -> None:
    assert len(hold(IMPL, cases=KV_WRITE)) == 24
