"""What the indexer chooses. Families: models/test_registry.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.worker.kernels.ops.index_write import IndexNorm
from services.worker.kernels.ops.paged_attention import make_attention_rows
from services.worker.kernels.registry import Facts, bind
from services.worker.layers import indexer as module
from services.worker.layers import latent_attention
from services.worker.layers.indexer import Indexer, IndexQueries, chosen
from services.worker.models.spec_latent import IndexerSpec
from tests.services.worker.kernels.impl.triton.hold import poisoned_allocations
from tests.services.worker.layers.test_decoder import run

BINDINGS = bind(("torch",), Facts("cpu"))


@pytest.mark.parametrize("together", [1 << 20, 1])
def test_each_token_gets_the_best_of_its_own_context(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a few tokens are scored at a time."""
    monkeypatch.setattr(module, "SCORES_BYTES", together)
    generator = torch.Generator().manual_seed(2)
    heads, dim, top_k, tables = 5, 8, 4, [[2, 0, 5], [4]]
    rows = make_attention_rows([1, 3], [10, 3], tables, 4)
    pages = torch.randn(6, 4, 12 + dim, generator=generator)
    q = torch.randn(4, heads, dim, generator=generator)
    weights = torch.randn(4, heads, generator=generator)
    indexer = Indexer(IndexerSpec(heads, dim, top_k, False), IndexNorm(torch.ones(dim), torch.zeros(dim)), BINDINGS)
    indexer.choose(IndexQueries(q, torch.empty(4, dim), weights), pages, rows)
    found = chosen(rows)
    assert found.block_tokens == 1 and found.context_lens.tolist() == [4, 1, 2, 3]
    for token, (row, context) in enumerate([(0, 10), (1, 1), (1, 2), (1, 3)]):
        slots = [tables[row][position // 4] * 4 + position % 4 for position in range(context)]
        keys = pages.view(-1, 12 + dim)[slots, 12:]
        scores = (weights[token, :, None] * (q[token] @ keys.T).relu()).sum(0)
        wanted = {slots[place] for place in scores.topk(min(top_k, context)).indices.tolist()}
        assert set(found.block_tables[token, : min(top_k, context)].tolist()) == wanted


def test_a_replayed_step_has_room_for_longer_contexts_and_for_rows_of_none() -> None:
    """What it chooses is the step's that is run as it is; memory that nobody has written is not looked at."""
    generator = torch.Generator().manual_seed(6)
    heads, dim, top_k, tables = 5, 8, 4, [[2, 0, 5], [4, 0, 0], [0, 0, 0]]
    rows = make_attention_rows([1, 1, 1], [10, 3, 0], tables, 4)
    pages, q = torch.randn(6, 4, 12 + dim, generator=generator), torch.randn(3, heads, dim, generator=generator)
    given = IndexQueries(q, torch.empty(3, dim), torch.randn(3, heads, generator=generator))
    indexer = Indexer(IndexerSpec(heads, dim, top_k, False), IndexNorm(torch.ones(dim), torch.zeros(dim)), BINDINGS)
    found = []
    for width in (10, 1000):
        replayed = replace(rows, max_context=width)
        with poisoned_allocations():
            indexer.choose(given, pages, replayed)
        found.append(chosen(replayed))
    assert found[0].context_lens.tolist() == [4, 3, 0]
    assert torch.equal(found[0].block_tables, found[1].block_tables)
    assert found[0].block_tables[1:].tolist() == [[16, 17, 18, 0], [0] * 4]


def test_at_the_end_of_131_072_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk and a row that decodes, scored a few tokens at a time, blocks in no order."""
    monkeypatch.setattr(module, "SCORES_BYTES", 3 << 20)
    generator = torch.Generator().manual_seed(4)
    heads, dim, top_k, length = 3, 8, 64, 131_072
    blocks = torch.randperm(8192, generator=generator)
    rows = make_attention_rows([1, 9], [100_003, length], [blocks.flip(0).tolist(), blocks.tolist()], 16)
    pages = torch.randn(8192, 16, 4 + dim, generator=generator)
    q, weights = torch.randn(10, heads, dim, generator=generator), torch.randn(10, heads, generator=generator)
    indexer = Indexer(IndexerSpec(heads, dim, top_k, False), IndexNorm(torch.ones(dim), torch.zeros(dim)), BINDINGS)
    indexer.choose(IndexQueries(q, torch.empty(10, dim), weights), pages, rows)
    found = chosen(rows).block_tables
    assert found.shape == (10, top_k)
    for token, context in enumerate([100_003, *range(length - 8, length + 1)]):
        order = (blocks if token else blocks.flip(0))[:, None] * 16 + torch.arange(16)
        slots = order.view(-1)[:context]
        keys = pages.view(-1, 4 + dim)[slots, 4:].double()
        scores = (weights[token, :, None].double() * (q[token].double() @ keys.T).relu()).sum(0)
        assert set(found[token].tolist()) == set(slots[scores.topk(top_k).indices].tolist())


def test_a_layer_without_an_indexer_attends_to_what_the_one_before_chose(make_tiny: Callable[[str], Any]) -> None:
    """Its own choice would give other logits."""
    tiny, prompt = make_tiny("glm_moe_dsa_shared"), list(range(3, 90))
    layers = [layer.attention for layer in tiny.decoder.layers]
    assert [layer.indexer is None for layer in layers] == [False, True, False]
    before = run(tiny.decoder, prompt, [len(prompt)])
    layers[0].indexer.norm.weight.neg_()
    try:
        assert (run(tiny.decoder, prompt, [len(prompt)]) - before).abs().max() > 0.01
    finally:
        layers[0].indexer.norm.weight.neg_()


def test_a_step_of_many_tokens_attends_in_pieces(
    make_tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kernels keep for each token is bounded, whatever the step's size."""
    tiny, prompt = make_tiny("DeepseekV32ForCausalLM"), list(range(3, 93))
    whole = run(tiny.decoder, prompt, [50, 40])
    monkeypatch.setattr(latent_attention, "CHOSEN_TOKENS", 16)
    asked: list[int] = []
    for layer in tiny.decoder.layers:
        decode = layer.attention._decode

        def counting(*given: Any, decode: Any = decode) -> torch.Tensor:
            asked.append(len(given[0]))
            return decode(*given)

        monkeypatch.setattr(layer.attention, "_decode", counting)
    torch.testing.assert_close(run(tiny.decoder, prompt, [50, 40]), whole, rtol=1e-5, atol=1e-5)
    assert asked[:3] == [16, 16, 16] and set(asked) == {16, 2, 8}
