"""Our layers against transformers' own implementation of every declared architecture, in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

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


def run(decoder: Any, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits of every position, the prompt cut into `chunks`, blocks of 8 in no order."""
    spec = decoder.spec
    blocks = torch.randperm(24, generator=torch.Generator().manual_seed(5)).tolist()
    cache = KvCache(torch.zeros(KvCache.shape(spec, 24, 8)))
    rope, out, done = RopeTable(spec.rope, 192, decoder.final_norm.weight), [], 0
    with torch.inference_mode():
        for count in chunks:
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
