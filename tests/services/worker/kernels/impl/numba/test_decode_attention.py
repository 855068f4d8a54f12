"""The provider's op against the op's meaning: outputs and both caches."""

import torch

from services.worker.kernels.ops.decode_attention import decode_attention
from services.worker.kernels.registry import Facts, find_impls

IMPLS, _ = find_impls("numba")
IMPL = IMPLS["decode_attention"]


def test_equals_the_meaning_where_it_does_what_is_asked() -> None:
    tolerance = decode_attention.tolerances[torch.float32]
    plain = [case for case in decode_attention.cases if case.make(torch.float32)[7][1:] == (0, 0.0, None, None)]
    assert len(plain) >= 5
    for case in plain:
        got, expected = case.make(torch.float32), case.make(torch.float32)
        pairs = [(IMPL.run(*got), decode_attention.meaning(*expected)), (got[2], expected[2]), (got[3], expected[3])]
        for left, right in pairs:
            torch.testing.assert_close(left, right, rtol=tolerance.relative, atol=tolerance.absolute)


def test_says_what_it_cannot_do() -> None:
    assert IMPL.refuses(Facts("cpu")) is None
    assert IMPL.refuses(Facts("cuda")) == "for CPUs"
    for name in ("kv_fp8", "window"):
        assert IMPL.refuses(Facts("cpu", shapes={name: 1})) == f"does not do {name}"
