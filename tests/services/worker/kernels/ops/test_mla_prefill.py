from services.worker.kernels.ops.mla_prefill import mla_prefill
from tests.services.worker.kernels.ops import mla_formula


def test_equals_formula() -> None:
    mla_formula.check(mla_prefill)
