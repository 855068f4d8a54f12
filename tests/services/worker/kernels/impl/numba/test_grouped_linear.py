"""The provider's op against the op's meaning, on one thread and on two."""

import pytest
import torch

from services.worker.kernels.ops.grouped_linear import grouped_linear
from services.worker.kernels.registry import Facts, find_impls

IMPLS, REASON = find_impls("numba")
IMPL = IMPLS["grouped_linear"]


@pytest.mark.parametrize("threads", [1, 2])
def test_equals_the_meaning(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    tolerance = grouped_linear.tolerances[torch.float32]
    for case in grouped_linear.cases:
        arguments = case.make(torch.float32)
        got = IMPL.run(*arguments)
        expected = grouped_linear.meaning(*arguments)
        assert got.is_contiguous()
        torch.testing.assert_close(got, expected, rtol=tolerance.relative, atol=tolerance.absolute)
    torch.set_num_threads(before)


def test_rows_do_not_depend_on_each_other_or_on_threads() -> None:
    x, tiles, bits, out_features = grouped_linear.cases[-3].make(torch.float32)
    whole = IMPL.run(x, tiles, bits, out_features)
    x[1:] = 1e6
    assert torch.equal(IMPL.run(x, tiles, bits, out_features)[0], whole[0])


def test_says_what_it_cannot_do() -> None:
    assert IMPL.refuses(Facts("cpu")) is None
    assert IMPL.refuses(Facts("cuda")) == "for CPUs"
