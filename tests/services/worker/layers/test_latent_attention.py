"""When keys and values are expanded, and that both ways give the same. Families: models/test_registry.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common import config as configuration
from common.errors import ConfigError
from services.worker.kernels.ops.paged_attention import ChunkLoad
from services.worker.layers import latent_attention
from services.worker.layers.latent_attention import LatentAttention, most_captured, prefers_expanded
from services.worker.model_engine import ModelEngine
from services.worker.models.spec_latent import IndexerSpec, LatentSpec
from tests.services.worker.layers.test_decoder import run

V3 = LatentSpec(latent=512, query_rank=1536, nope_dim=128, rope_dim=64, value_dim=128)


def load(*rows: tuple[int, int]) -> tuple[int, ChunkLoad]:
    """Tokens of rows, each with so many and so long a context, and what they have to do."""
    counts, context = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return int(counts.sum()), ChunkLoad.of(counts, context)


@pytest.mark.parametrize(
    ("rows", "expanded"),
    [
        ([(2048, 2048)], True),
        ([(16, 16), (40, 40)], True),  # whole prompts, however short
        ([(170, 100_000)], False),
        ([(180, 100_000)], True),
        ([(4, 5000), (2, 90)], False),  # drafts to verify
        ([(1024, 1024), (8, 200_000)], False),
    ],
)
def test_what_is_cheaper(rows: list[tuple[int, int]], expanded: bool) -> None:
    assert prefers_expanded(V3, *load(*rows)) is expanded


def test_from_the_break_even_on_any_context_is_expanded() -> None:
    tokens = most_captured(V3)
    assert tokens == 512 * 256 // (2 * 512 + 64 - 320) == 170
    assert not prefers_expanded(V3, *load((tokens - 1, 1 << 22)))
    assert prefers_expanded(V3, *load((tokens + 1, 1 << 22)))


def test_what_is_captured() -> None:
    assert most_captured(replace(V3, indexer=IndexerSpec(64, 128, 2048, False))) == 0
    assert most_captured(None) > 1_000_000


def test_8_bits_are_refused(make_tiny: Callable[[str], Any]) -> None:
    folder = make_tiny("deepseek_v3_yarn").folder
    settings = [f"model.source={folder}", "model.dtype=float32", "worker.device=cpu", "kv.dtype=fp8"]
    with pytest.raises(ConfigError, match=r'kv\.dtype is "fp8": latent attention caches latents as they are'):
        ModelEngine(configuration.load(None, settings), lambda progress: None)


def test_the_rule_counts_products() -> None:
    """Of one head, counted one by one."""
    tokens, work = load((7, 30), (2, 50))
    pairs = sum(range(24, 31)) + 49 + 50
    projected = 512 * 256
    expanded = pairs * (192 + 128) + 80 * projected
    absorbed = pairs * (576 + 512) + tokens * projected
    assert work.pairs == pairs and prefers_expanded(V3, tokens, work) is (expanded <= absorbed)


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3_yarn"])
def test_absorbed_and_expanded_are_the_same(
    make_tiny: Callable[[str], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a few heads are expanded at a time."""
    tiny, prompt = make_tiny(name), list(range(3, 60))
    asked: list[str] = []
    for way in ("_absorb", "_attend_expanded"):
        original = getattr(LatentAttention, way)
        monkeypatch.setattr(
            LatentAttention, way, lambda *given, way=way, original=original: asked.append(way) or original(*given)
        )
    results = []
    for expanded, size in ((False, 1), (True, 1 << 30), (True, 1)):
        monkeypatch.setattr(latent_attention, "prefers_expanded", lambda *given, expanded=expanded: expanded)
        monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", size)
        asked.clear()
        results.append(run(tiny.decoder, prompt, [30, 27]))
        assert set(asked) == {"_attend_expanded" if expanded else "_absorb"}
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-4)


def test_the_up_projection_is_kept_once(make_tiny: Callable[[str], Any]) -> None:
    """W_UK and W_UV are views of the checkpoint's matrix."""
    tiny = make_tiny("deepseek_v3_yarn")
    attention = tiny.decoder.layers[0].attention
    held = [value for value in vars(attention).values() if isinstance(value, torch.Tensor)]
    assert [tuple(tensor.shape) for tensor in held] == [(6, 22, 24)]
    assert torch.equal(held[0].flatten(0, 1), tiny.tensors["model.layers.0.self_attn.kv_b_proj.weight"])
