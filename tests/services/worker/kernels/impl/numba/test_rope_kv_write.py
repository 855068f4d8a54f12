"""The provider's op against the op's meaning: the queries and both caches, on one thread and on two."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kernels.ops.rope_kv_write import make_rope_kv_case, rope_kv_write
from services.worker.kernels.registry import Case, Facts, find_impls

IMPLS, REASON = find_impls("numba")
IMPL = IMPLS["rope_kv_write"]


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def equals_the_meaning(case: Case) -> None:
    tolerance = rope_kv_write.tolerances[torch.float32]
    got, expected = case.make(torch.float32), case.make(torch.float32)
    q, wanted = IMPL.run(*got), rope_kv_write.meaning(*expected)
    pairs = [(q, wanted), (got[3], expected[3]), (got[4], expected[4])]
    for left, right in pairs:
        torch.testing.assert_close(left, right, rtol=tolerance.relative, atol=tolerance.absolute)
    assert torch.equal(got[0], expected[0]), "the projection is left as it is"


def test_equals_the_meaning_in_every_case() -> None:
    for case in rope_kv_write.cases:
        if case.make(torch.float32)[7] is not None:
            continue
        equals_the_meaning(case)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([1, 2, 3, 70, 300]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(0, 9),
    st.booleans(),
)
def test_equals_the_meaning_at_any_size(
    tokens: int, share: int, kv_heads: int, half: int, rest: int, normed: bool
) -> None:
    equals_the_meaning(make_rope_kv_case(tokens, share * kv_heads, kv_heads, 2 * half + rest, 2 * half, normed))


def test_says_what_it_cannot_do() -> None:
    assert IMPL.refuses(Facts("cpu")) is None
    assert IMPL.refuses(Facts("cuda")) == "for CPUs"
    assert IMPL.refuses(Facts("cpu", dtype=torch.bfloat16)) == "computes in fp32, not bfloat16"
    assert IMPL.refuses(Facts("cpu", shapes={"kv_fp8": 1})) == "does not do kv_fp8"
