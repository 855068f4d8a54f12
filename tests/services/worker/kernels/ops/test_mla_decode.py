from services.worker.kernels.ops.mla_decode import mla_decode
from tests.services.worker.kernels.ops import mla_formula


def test_equals_formula() -> None:
    mla_formula.check(mla_decode)
