"""Our layers against transformers' own implementation of every declared architecture, in float32."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from services.worker.kernels.ops.kv_write import KvScale
from services.worker.kernels.ops.paged_attention import make_attention_rows
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.rope import RopeTable

NAMES = [
    "llama",
    "llama_tied_biased",
    "llama_llama3_rope",
    "llama_linear_rope",
    "llama_yarn_rope",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_tied",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "mixtral",
]


def run(decoder: Any, tokens: list[int], chunks: list[int], caches: Sequence[KvCache] = ()) -> torch.Tensor:
    """Logits of every position, the prompt cut into `chunks`, blocks of 8 in no order; `caches`: each chunk's."""
    spec = decoder.spec
    blocks = torch.randperm(24, generator=torch.Generator().manual_seed(5)).tolist()
    caches = caches or [KvCache(torch.zeros(KvCache.shape(spec, 24, 8)))] * len(chunks)
    rope, out, done = RopeTable(spec.rope, 192, decoder.final_norm.weight), [], 0
    with torch.inference_mode():
        for count, cache in zip(chunks, caches, strict=True):
            positions = torch.arange(done, done + count)
            slots = torch.tensor(blocks)[positions // 8] * 8 + positions % 8
            rows = make_attention_rows([count], [done + count], [blocks], 8)
            ids = torch.tensor(tokens[done : done + count])
            out.append(decoder.logits(decoder(ids, rope.at(positions), slots, rows, cache, None)))
            done += count
    return torch.cat(out)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers_under_any_chunking(make_tiny: Callable[[str], Any], name: str) -> None:
    tiny = make_tiny(name)
    tokens = torch.randint(0, 131, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = tiny.logits(tokens)
    assert wanted.std() > 0.5, "a checkpoint whose logits are all alike would prove nothing"
    for chunks in ([150], [64, 64, 22], [1] * 5 + [17, 128], [149, 1]):
        torch.testing.assert_close(run(tiny.decoder, tokens, chunks), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_tied"])
def test_an_8_bit_cache_moves_logits_a_little_unless_a_scale_is_wrong(
    make_tiny: Callable[[str], Any], name: str
) -> None:
    tiny, spec = make_tiny(name), make_tiny(name).decoder.spec
    tokens = torch.randint(0, 131, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = tiny.logits(tokens)[100:]

    def error(*factors: tuple[float, float]) -> float:
        """Of the last 50 positions' logits, relative; each chunk finds other scales of keys and of values."""
        storage = torch.zeros(KvCache.shape(spec, 24, 8)).to(torch.float8_e4m3fn)
        scales = [KvScale(torch.tensor([k]), torch.tensor([v])) for k, v in factors]
        caches = [KvCache(storage, [scale] * spec.num_layers) for scale in scales]
        logits = run(tiny.decoder, tokens, [100, *[1] * 49, 1], [caches[0], *[caches[-1]] * 50])[100:]
        return float((logits - wanted).norm() / wanted.norm())

    assert 0 < error((1.0, 1.0)) < 0.2 and error((0.3, 0.7)) < 0.2
    assert min(error((1.0, 1.0), (1.6, 1.0)), error((1.0, 1.0), (1.0, 1.6))) > 0.25


def test_asks_for_every_parameter_once(make_tiny: Callable[[str], Any]) -> None:
    for name in NAMES:
        tiny = make_tiny(name)
        tied = tiny.decoder.spec.tie_embeddings
        wanted = [key for key in tiny.parameters.tensors if not (tied and key == "lm_head.weight")]
        assert sorted(tiny.parameters.asked) == sorted(wanted)


def test_outputs_selects_tokens_before_the_last_mlp(tiny: Any) -> None:
    decoder, spec = tiny.decoder, tiny.decoder.spec
    rows = make_attention_rows([5], [5], [[0]], 8)
    rope = RopeTable(spec.rope, 8, decoder.final_norm.weight)
    arguments = (torch.tensor([3, 1, 4, 1, 5]), rope.at(torch.arange(5)), torch.arange(5), rows)
    cache = KvCache(torch.zeros(KvCache.shape(spec, 1, 8)))
    every = decoder.logits(decoder(*arguments, cache, None))
    some = decoder.logits(decoder(*arguments, cache, torch.tensor([4, 1])))
    torch.testing.assert_close(some, every[[4, 1]], rtol=0, atol=1e-5)
