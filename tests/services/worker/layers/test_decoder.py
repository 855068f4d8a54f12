"""A decoder by itself: caches of 8 bits, and outputs of some tokens only. Families: models/test_registry.py."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from services.worker.groups import GroupStep
from services.worker.kernels.ops.kv_write import KvScale
from services.worker.kernels.ops.paged_attention import make_attention_rows
from services.worker.layers.kv_cache import GroupedCache, KvCache
from services.worker.layers.rope import RopeTable
from tests.services.worker.tiny import FLOAT, layout_of


def run(decoder: Any, tokens: list[int], chunks: list[int], caches: Sequence[KvCache] = ()) -> torch.Tensor:
    """Logits of every position, the prompt cut into `chunks`, blocks of 8 in no order; `caches`: each chunk's.

    A state is in block 5, which nobody has cleared.
    """
    spec = decoder.spec
    blocks = torch.randperm(24, generator=torch.Generator().manual_seed(5)).tolist()
    layout = layout_of(decoder)
    if not caches:
        made = GroupedCache(layout, [24] * len(layout.pools), 8, FLOAT, torch.device("cpu"))
        for pool in made.pools[1:]:
            for tensor, _ in pool:
                tensor.fill_(7.0)
        caches = [made] * len(chunks)
    rope, out, done = RopeTable(spec.ropes, 192, decoder.final_norm.weight), [], 0
    with torch.inference_mode():
        for count, cache in zip(chunks, caches, strict=True):
            positions = torch.arange(done, done + count)
            slots = torch.tensor(blocks)[positions // 8] * 8 + positions % 8
            rows = make_attention_rows([count], [done + count], [blocks], 8)
            ids = torch.tensor(tokens[done : done + count])
            beside = [GroupStep(torch.tensor([5]), rows)] * (len(layout.groups) - 1)
            out.append(decoder.logits(decoder(ids, rope.at(positions), slots, rows, cache, None, beside)))
            done += count
    return torch.cat(out)


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


def test_outputs_selects_tokens_before_the_last_mlp(tiny: Any) -> None:
    decoder, spec = tiny.decoder, tiny.decoder.spec
    rows = make_attention_rows([5], [5], [[0]], 8)
    rope = RopeTable(spec.ropes, 8, decoder.final_norm.weight)
    arguments = (torch.tensor([3, 1, 4, 1, 5]), rope.at(torch.arange(5)), torch.arange(5), rows)
    cache = KvCache(torch.zeros(KvCache.shape(spec, 1, 8)))
    every = decoder.logits(decoder(*arguments, cache, None))
    some = decoder.logits(decoder(*arguments, cache, torch.tensor([4, 1])))
    torch.testing.assert_close(some, every[[4, 1]], rtol=0, atol=1e-5)
