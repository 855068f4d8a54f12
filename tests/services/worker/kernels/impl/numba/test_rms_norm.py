"""The provider's op against the op's meaning, and what it leaves to it."""

import torch

from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Facts, find_impls

IMPLS, REASON = find_impls("numba")
IMPL = IMPLS["rms_norm"]


def test_equals_the_meaning() -> None:
    tolerance = rms_norm.tolerances[torch.float32]
    for case in rms_norm.cases:
        got, expected = IMPL.run(*case.make(torch.float32)), rms_norm.meaning(*case.make(torch.float32))
        torch.testing.assert_close(got, expected, rtol=tolerance.relative, atol=tolerance.absolute)


def test_says_what_it_cannot_do() -> None:
    assert IMPL.refuses(Facts("cpu")) is None
    assert IMPL.refuses(Facts("cuda")) == "for CPUs"
    assert IMPL.refuses(Facts("cpu", dtype=torch.float16)) == "computes in fp32, not float16"
