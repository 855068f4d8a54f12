"""Sizes that follow from a declaration; names and shapes are held against checkpoints by test_registry.py."""

from dataclasses import replace

from services.worker.models.spec_latent import GATE_NUMBERS, IndexerSpec, LatentSpec

V3 = LatentSpec(latent=512, query_rank=1536, nope_dim=128, rope_dim=64, value_dim=128)


def test_a_row_is_what_a_token_keeps() -> None:
    assert (V3.cached, V3.row, V3.query_dim, V3.expanded) == (576, 576, 192, 256)
    assert replace(V3, indexer=IndexerSpec(64, 128, 2048, False)).row == 704
    assert replace(V3, gate=512).row == 576 + GATE_NUMBERS


def test_costs_count_the_published_matrices() -> None:
    """187 million weights of attention in a layer of DeepSeek-V3."""
    weights, per_token = V3.costs(7168, 128)
    assert weights == 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168 == 187_105_280
    assert per_token == 128 * 320
    direct, _ = replace(V3, query_rank=0).costs(7168, 128)
    assert direct == weights - 7168 * 1536 - 1536 * 128 * 192 + 7168 * 128 * 192


def test_layers_that_share_a_choice() -> None:
    own = IndexerSpec(4, 8, 16, True)
    assert not own.shares(3) and replace(own, shared=(False, True)).shares(1)


def test_sparse_attention_costs_a_far_token_its_indexer_only() -> None:
    """V3.2's."""
    (weights, _), (more, index) = (
        each.costs(7168, 128) for each in (V3, replace(V3, indexer=IndexerSpec(64, 128, 2048, False)))
    )
    assert index == 64 * 128
    assert more - weights == 2048 * 128 * (2 * 512 + 64)
