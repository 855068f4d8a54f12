"""The provider's op against the op's meaning: every case and any mix of rows, on one thread and on two."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kernels.ops.paged_attention import AttentionSpec, make_attention_rows, paged_attention
from services.worker.kernels.registry import Facts, find_impls

IMPLS, REASON = find_impls("numba")
IMPL = IMPLS["paged_attention"]
CASES = [case for case in paged_attention.cases if case.make(torch.float32)[4][1:] == (0, 0.0, None, None)]


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_equals_the_meaning() -> None:
    tolerance = paged_attention.tolerances[torch.float32]
    for case in CASES:
        arguments = case.make(torch.float32)
        torch.testing.assert_close(
            IMPL.run(*arguments),
            paged_attention.meaning(*arguments),
            rtol=tolerance.relative,
            atol=tolerance.absolute,
            msg=lambda text, name=case.name: f"{name}: {text}",
        )


def test_nothing_outside_the_own_context_counts() -> None:
    """Changing what lies behind a row's end, or in blocks of nobody, changes nothing, bit by bit."""
    for case in CASES:
        q, k_cache, v_cache, rows, spec = case.make(torch.float32)
        before = IMPL.run(q, k_cache, v_cache, rows, spec)
        size = k_cache.shape[1]
        own = torch.zeros(k_cache.shape[:2], dtype=torch.bool)
        for row, length in enumerate(rows.context_lens.tolist()):
            for i in range(length):
                own[rows.tables[row, i // size], i % size] = True
        k_cache[~own] = 1e4
        v_cache[~own] = -1e4
        assert torch.equal(IMPL.run(q, k_cache, v_cache, rows, spec), before), case.name


def test_queries_may_be_a_part_of_a_wider_tensor_and_scores_large() -> None:
    rows = make_attention_rows([1, 1], [40, 3], [[2, 0, 1], [3]], 16)
    fused, cache = torch.randn(2, 9, 64) * 30, torch.randn(2, 4, 16, 3, 64)
    q = fused[:, :6]
    spec = AttentionSpec(1.0)
    expected = paged_attention.meaning(q.contiguous(), cache[0], cache[1], rows, spec)
    torch.testing.assert_close(IMPL.run(q, cache[0], cache[1], rows, spec), expected, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 60)), min_size=1, max_size=6), st.sampled_from([1, 2, 8]))
def test_any_mix_of_rows(sizes: list[tuple[int, int]], block_tokens: int) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    counts, context = [count for count, _ in sizes], [count + past for count, past in sizes]
    needed = [-(-length // block_tokens) for length in context]
    pool = torch.randperm(sum(needed), generator=generator)
    rows = make_attention_rows(counts, context, [p.tolist() for p in torch.split(pool, needed)], block_tokens)
    q = torch.randn(sum(counts), 4, 8, generator=generator)
    cache = torch.randn(2, len(pool), block_tokens, 2, 8, generator=generator)
    spec = AttentionSpec(0.3)
    expected = paged_attention.meaning(q, cache[0], cache[1], rows, spec)
    torch.testing.assert_close(IMPL.run(q, cache[0], cache[1], rows, spec), expected, rtol=1e-5, atol=1e-5)


def test_says_what_it_cannot_do() -> None:
    assert IMPL.refuses(Facts("cpu")) is None
    assert IMPL.refuses(Facts("cuda")) == "for CPUs"
    assert IMPL.refuses(Facts("cpu", dtype=torch.bfloat16)) == "computes in fp32, not bfloat16"
    assert IMPL.refuses(Facts("cpu", shapes={"window": 0, "sinks": 1})) == "does not do sinks"
