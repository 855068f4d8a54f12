"""Who has what: every head, row and column exactly once, KV heads as often as ranks need them."""

from dataclasses import replace

import pytest

from services.worker.models.spec import DecoderSpec, MoeSpec, RopeSpec
from services.worker.shares import MOST_RANKS, Heads, Rank, Span, heads_of, local_spec

SPEC = DecoderSpec(
    vocab_size=131,
    hidden_size=48,
    intermediate_size=1536,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=16,
    rms_eps=1e-6,
    rope=RopeSpec(1e4, 16),
    max_position=64,
    tie_embeddings=True,
)


@pytest.mark.parametrize("width", [7, 40, 80, 768, 1536, 2880, 11_008, 14_336, 18_944, 28_672])
@pytest.mark.parametrize("ranks", range(1, MOST_RANKS + 1))
def test_widths_are_divided_without_gaps_and_about_evenly(width: int, ranks: int) -> None:
    if width < ranks:
        return
    spans = [Rank(rank, ranks).of_width(width) for rank in range(ranks)]
    assert [span.begin for span in spans] == [0, *(span.end for span in spans[:-1])] and spans[-1].end == width
    assert all(span.size > 0 for span in spans)
    assert max(span.size for span in spans) <= max(1.05 * width / ranks, width // ranks + 1)


def test_shares_follow_blocks_of_weights_where_that_costs_little() -> None:
    assert [Rank(rank, 2).of_width(11_008).size for rank in range(2)] == [21 * 256, 22 * 256]
    assert [Rank(rank, 4).of_width(14_336).size for rank in range(4)] == [14 * 256] * 4
    assert [Rank(rank, 8).of_width(768).size for rank in range(8)] == [96] * 8
    assert [Rank(rank, 4).of_width(40).size for rank in range(4)] == [10] * 4


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (9, 3), (6, 2), (64, 8), (6, 6), (8, 1), (12, 2)])
def test_every_query_head_is_with_its_kv_head(heads: int, kv_heads: int) -> None:
    group = heads // kv_heads
    for ranks in range(1, MOST_RANKS + 1):
        if ranks > kv_heads and (ranks % kv_heads or ranks > heads):
            with pytest.raises(ValueError, match=r"worker\.tensor_parallel may be 1, "):
                heads_of(Rank(0, ranks), heads, kv_heads)
            continue
        all_heads = [heads_of(Rank(rank, ranks), heads, kv_heads) for rank in range(ranks)]
        assert [head for each in all_heads for head in range(*each.query)] == list(range(heads))
        for query, kv in all_heads:
            assert {head // group for head in range(*query)} == set(range(*kv)), "those that it attends with"
            assert query.size % kv.size == 0, "kernels share KV heads evenly"
        assert {head for each in all_heads for head in range(*each.kv)} == set(range(kv_heads))


def test_more_ranks_than_kv_heads() -> None:
    assert heads_of(Rank(3, 4), 6, 2) == Heads(Span(4, 6), Span(1, 2))
    assert [heads_of(Rank(rank, 4), 6, 2).query.size for rank in range(4)] == [1, 2, 1, 2]


def test_the_values_that_are_possible_are_named() -> None:
    with pytest.raises(ValueError, match="may be 1, 2, 3, 6 for this model"):
        heads_of(Rank(0, 4), 9, 3)


def test_what_a_rank_computes() -> None:
    local = local_spec(SPEC, Rank(0, 2))
    assert (local.num_heads, local.num_kv_heads, local.intermediate_size) == (3, 1, 768)
    assert local.vocab_size == 131, "logits are whole at every rank"
    mixture = local_spec(replace(SPEC, moe=MoeSpec(8, 2, 96, True)), Rank(1, 2))
    assert mixture.moe == MoeSpec(8, 2, 48, True) and mixture.num_heads == 6
    with pytest.raises(ValueError, match="an MLP of 1 cannot be divided among 2 ranks"):
        local_spec(replace(SPEC, moe=MoeSpec(8, 2, 1, True)), Rank(1, 2))
