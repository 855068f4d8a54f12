"""The provider's op against the op's meaning, and what it leaves to it."""

import torch

from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Facts, find_impls

IMPLS, REASON = find_impls("numba")
IMPL = IMPLS["silu_and_mul"]


def test_equals_the_meaning() -> None:
    tolerance = silu_and_mul.tolerances[torch.float32]
    for case in silu_and_mul.cases:
        got, expected = IMPL.run(*case.make(torch.float32)), silu_and_mul.meaning(*case.make(torch.float32))
        torch.testing.assert_close(got, expected, rtol=tolerance.relative, atol=tolerance.absolute)


def test_says_what_it_cannot_do() -> None:
    assert IMPL.refuses(Facts("cpu")) is None
    assert IMPL.refuses(Facts("cuda")) == "for CPUs"
    assert IMPL.refuses(Facts("cpu", dtype=torch.float16)) == "computes in fp32, not float16"


def test_far_values_stay_finite() -> None:
    gate = torch.tensor([[-1e30, -200.0, -87.5, -1e-8, 0.0, 1e-8, 87.5, 1e30]])
    x = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    torch.testing.assert_close(IMPL.run(x), silu_and_mul.meaning(x), rtol=2e-6, atol=1e-6)
