from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.kernels.ops.paged_attention import (
    AttentionRows,
    AttentionSpec,
    Extras,
    make_attention_case,
    make_attention_rows,
    paged_attention,
)


def formula(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, spec: AttentionSpec) -> Tensor:
    """One token and one head at a time."""
    out = torch.empty(*q.shape[:2], v_cache.shape[3], dtype=q.dtype)
    size, share = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    starts, context = rows.query_starts.tolist(), rows.context_lens.tolist()
    k_scale, v_scale = (float(scale) for scale in spec.kv_scale or (torch.ones(1), torch.ones(1)))
    for row, length in enumerate(context):
        table = rows.block_tables[row if rows.table_rows is None else int(rows.table_rows[row])].tolist()
        first = length - (starts[row + 1] - starts[row])
        for offset, token in enumerate(range(starts[row], starts[row + 1])):
            past = max(first + offset + 1 - spec.window, 0) if spec.window else 0
            seen = [(table[i // size], i % size) for i in range(past, first + offset + 1)]
            keys = torch.stack([k_cache[block, place] for block, place in seen]) * k_scale
            values = torch.stack([v_cache[block, place] for block, place in seen]) * v_scale
            for head in range(q.shape[1]):
                score = keys[:, head // share] @ q[token, head] * spec.scale
                if spec.softcap:
                    score = spec.softcap * torch.tanh(score / spec.softcap)
                weight = torch.exp(score)
                total = weight.sum() + (torch.exp(spec.sinks[head].double()) if spec.sinks is not None else 0)
                out[token, head] = (weight[:, None] * values[:, head // share]).sum(0) / total * spec.value_scale
    return out


def test_equals_formula(check: Any) -> None:
    check(paged_attention, formula)


@pytest.mark.parametrize("extras", [Extras(value_dim=16), Extras(value_dim=40, window=20, sinks=True)])
def test_values_of_their_own_size_and_scale(extras: Extras) -> None:
    case = make_attention_case("", [1, 1, 20, 9], [50, 7, 90, 9], (4, 2, 48), extras=extras)
    arguments = case.make(torch.float32)
    torch.testing.assert_close(paged_attention.meaning(*arguments), formula(*arguments), rtol=1e-5, atol=1e-5)


def test_chunks_count_their_tokens_from_the_first_of_them() -> None:
    mixed = make_attention_rows([1, 1, 5, 1, 7], [9, 9, 9, 9, 9], [[0], [1], [2], [3], [4]], 16)
    assert mixed.num_decode == 2 and mixed.chunk_starts.tolist() == [0, 5, 6, 13]
    chunks = make_attention_rows([5, 7], [9, 9], [[0], [1]], 16)
    assert chunks.chunk_starts is chunks.query_starts


def test_nothing_outside_the_own_context_counts() -> None:
    """Changing what lies behind a row's end, or in blocks of nobody, changes nothing, bit by bit."""
    for case in paged_attention.cases:
        q, k_cache, v_cache, rows, spec = case.make(torch.float32)
        before = paged_attention.meaning(q, k_cache, v_cache, rows, spec)
        size = k_cache.shape[1]
        own = torch.zeros(k_cache.shape[:2], dtype=torch.bool)
        for row, length in enumerate(rows.context_lens.tolist()):
            for i in range(length):
                own[rows.tables[row, i // size], i % size] = True
        for cache, wild in ((k_cache, 400.0), (v_cache, -400.0)):
            cache.copy_(torch.where(own[..., None, None], cache.float(), torch.tensor(wild)))
        assert torch.equal(paged_attention.meaning(q, k_cache, v_cache, rows, spec), before), case.name


def test_similar_decode_rows_share_a_group_and_runs_are_not_gathered() -> None:
    apart = [list(range(40 * i, 40 * i + 40, 2)) for i in range(4)]
    rows = make_attention_rows([1, 1, 1, 1], [300, 310, 20, 290], apart, 16)
    assert [(group.context, group.run) for group in rows.groups] == [(320, -1), (20, -1)]
    runs = [list(range(40 * i, 40 * i + 40)) for i in range(4)]
    rows = make_attention_rows([1, 1, 1, 1], [600, 60, 50, 590], runs, 16)
    assert [(group.context, group.run) for group in rows.groups] == [(600, 0), (590, 120), (64, -1)]
    chunk = make_attention_rows([8], [40], [[3, 4, 5]], 16).groups[0]
    assert (chunk.run, chunk.is_chunk, chunk.blocks) == (3, True, None)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=6), st.sampled_from([1, 2, 8]))
def test_any_mix_of_rows(sizes: list[tuple[int, int]], block_tokens: int) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    counts, context = [count for count, _ in sizes], [count + past for count, past in sizes]
    needed = [-(-length // block_tokens) for length in context]
    pool = torch.randperm(sum(needed), generator=generator)
    rows = make_attention_rows(counts, context, [p.tolist() for p in torch.split(pool, needed)], block_tokens)
    q = torch.randn(sum(counts), 4, 8, generator=generator)
    cache = torch.randn(2, len(pool), block_tokens, 2, 8, generator=generator)
    got = paged_attention.meaning(q, cache[0], cache[1], rows, AttentionSpec(0.3))
    torch.testing.assert_close(got, formula(q, cache[0], cache[1], rows, AttentionSpec(0.3)), rtol=1e-5, atol=1e-5)


def test_needs_heads_that_share_evenly() -> None:
    rows = make_attention_rows([1], [1], [[0]], 16)
    cache = torch.ones(1, 16, 2, 8)
    with pytest.raises(RuntimeError):
        paged_attention.meaning(torch.ones(1, 3, 8), cache, cache, rows, AttentionSpec(1.0))


@pytest.mark.parametrize("runs", [False, True])
def test_scales_of_each_token_and_head(runs: bool) -> None:
    """As if the cache held the wide numbers."""
    case = make_attention_case("each", [1, 1, 20], [120, 700, 50], (4, 2, 64), runs, Extras(fp8=2))
    q, k_cache, v_cache, rows, spec = case.make(torch.float32)
    assert spec.kv_scale is not None and k_cache.dtype == torch.float8_e4m3fn
    k, v = (x.float() * scale[..., None] for x, scale in zip((k_cache, v_cache), spec.kv_scale, strict=True))
    wanted = paged_attention.meaning(q, k, v, rows, spec._replace(kv_scale=None))
    torch.testing.assert_close(paged_attention.meaning(q, k_cache, v_cache, rows, spec), wanted)
