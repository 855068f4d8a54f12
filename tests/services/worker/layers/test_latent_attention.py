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
from services.worker.layers.kv_cache import GroupedCache
from services.worker.layers.kv_scales import KvScales
from services.worker.layers.latent_attention import LatentAttention, most_captured, prefers_expanded
from services.worker.model_engine import ModelEngine
from services.worker.models.spec_latent import IndexerSpec, LatentSpec
from tests.services.worker.layers.test_decoder import run
from tests.services.worker.tiny import FLOAT, layout_of

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


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [
        ("EgMlaForCausalLM", "fp8", 'a gate.s numbers need 16 bits; set "auto"'),
        ("deepseek_v3_yarn", "fp8_per_token_head", 'latents have one scale for all heads; set "auto"'),
    ],
)
def test_8_bits_that_are_refused(make_tiny: Callable[[str], Any], name: str, dtype: str, why: str) -> None:
    settings = [f"model.source={make_tiny(name).folder}", "model.dtype=float32", "worker.device=cpu"]
    with pytest.raises(ConfigError, match=rf'kv\.dtype is "{dtype}": {why}'):
        ModelEngine(configuration.load(None, [*settings, f"kv.dtype={dtype}"]), lambda progress: None)


def test_a_start_with_8_bits_has_more_tokens(make_tiny: Callable[[str], Any]) -> None:
    """In the same memory."""
    given = [f"model.source={make_tiny('deepseek_v3_yarn').folder}", "model.dtype=float32", "worker.device=cpu"]
    given += ["kv.memory_gib=0.0005", "scheduler.max_rows=200", "scheduler.step_tokens=32", "model.max_len=64"]
    blocks = []
    for dtype in ("auto", "fp8"):
        engine = ModelEngine(configuration.load(None, [*given, f"kv.dtype={dtype}"]), lambda progress: None)
        blocks.append(engine.facts.num_blocks)
    assert engine.facts.kv_dtype == "float8_e4m3fn" and blocks[1] // blocks[0] == 4, blocks  # of fp32


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3_yarn", "glm_moe_dsa_shared"])
def test_8_bits_move_logits_a_little_unless_a_scale_is_wrong(
    make_tiny: Callable[[str], Any], name: str, expanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_attention, "prefers_expanded", lambda *given: expanded)
    tiny, spec = make_tiny(name), make_tiny(name).decoder.spec
    tokens = torch.randint(0, 131, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = run(tiny.decoder, tokens, [80])[50:]
    layout = layout_of(tiny.decoder)
    narrow = FLOAT._replace(pages=torch.float8_e4m3fn)

    def error(*scales: float) -> float:
        """Of the last positions' logits, relative; each chunk finds other scales."""
        caches = [
            GroupedCache(layout, [24], 8, narrow, torch.device("cpu"), scales=KvScales(False, given))
            for given in (dict.fromkeys(range(spec.num_layers), (each, each)) if each else {} for each in scales)
        ]
        for cache in caches[1:]:
            assert cache.pools[0][0][0].shape == caches[0].pools[0][0][0].shape
            cache.layers = [
                own._replace(scale=layer.scale) for own, layer in zip(caches[0].layers, cache.layers, strict=True)
            ]
        every = [caches[0], *[caches[-1]] * 2]
        logits = run(tiny.decoder, tokens, [50, 29, 1], every)[50:]
        return float((logits - wanted).norm() / wanted.norm())

    unscaled = error(0.0)
    most = 0.25 if spec.latent.indexer is None else 0.6  # some of the tokens that are chosen are others
    assert 0 < unscaled < most
    assert error(1.0) == pytest.approx(unscaled, abs=0.02) and error(0.3) < most
    assert error(1.0, 3.0) > 2 * unscaled


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
