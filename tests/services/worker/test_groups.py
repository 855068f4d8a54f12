"""Layouts of real models' caches, and a made-up recurrent model that the real core serves with them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from common.config import Scheduler
from common.kv_needs import needs
from common.protocol import KvGroup
from services.worker.groups import GroupStep, Layout, Storage, checkpoint_tokens, lay_out, plain
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.layers.kv_cache import KvCache
from services.worker.models.caches import LayerCache, PagedKv, RecurrentState, StateTensor
from services.worker.models.spec import RopeSpec
from tests.services.worker.served import SHAPE, Served

BF16 = Storage(torch.bfloat16, torch.bfloat16)
FULL = KvGroup("full")


def windows(layers: int, is_full: Any, window: int, heads: int, dim: int) -> list[LayerCache]:
    return [PagedKv(heads, dim, dim, 0 if is_full(i) else window) for i in range(layers)]


def padding(layout: Layout) -> int:
    return len(layout.groups) * len(layout.pools[0]) - len(layout.layers)


def test_layers_that_keep_everything_are_one_group() -> None:
    kept = [PagedKv(8, 128, 128)] * 32
    layout = lay_out(kept, 16, BF16)
    assert layout == plain(kept) and layout.is_plain and layout.pages == [0]
    assert layout.block_bytes(16, BF16) == (32 * 16 * 8 * 256 * 2,)
    mixed = [PagedKv(1, 576, 0), PagedKv(1, 576, 128)]  # a latent, and one with an indexer's keys
    assert lay_out(mixed, 16, BF16) == plain(mixed)


def test_gpt_oss_20b_has_two_groups_of_one_pool_and_wastes_nothing() -> None:
    layout = lay_out(windows(24, lambda i: i % 2, 128, 8, 64), 16, BF16)
    assert layout.groups == (FULL, KvGroup("window", 0, 128)) and padding(layout) == 0
    assert layout.layers[:3] == ((1, 0), (0, 0), (1, 1)) and len(layout.pools) == 1
    # of a sequence of 8,192 tokens: 512 pages and 9, where all layers' pages would be 2 * 512
    assert needs(layout.groups, 1, 8192, 16) == [512 + 10]


def test_gemma_3_27b_has_seven_groups_and_leaves_8_of_70_places_empty() -> None:
    layout = lay_out(windows(62, lambda i: (i + 1) % 6 == 0, 1024, 16, 128), 16, BF16)
    assert [group.kind for group in layout.groups] == ["full", *["window"] * 6] and padding(layout) == 8
    ideal = 10 * 8192 + 52 * 1024
    assert 1.05 < sum(needs(layout.groups, 1, 8192, 16)) * 16 * 10 / ideal < 1.11


def test_pages_of_unlike_sizes_have_a_pool_each() -> None:
    """MiMo-V2-Flash: 9 layers with 4 KV heads, 39 with a window and 8."""
    full, window = PagedKv(4, 192, 128), PagedKv(8, 192, 128, 128)
    layout = lay_out([full if i % 6 == 0 or i == 47 else window for i in range(48)], 16, BF16)
    assert layout.groups == (FULL, KvGroup("window", 1, 128)) and [len(pool) for pool in layout.pools] == [9, 39]


def test_states_are_one_group_whose_checkpoints_weigh_as_much_as_pages() -> None:
    """Qwen3-Next: 12 layers of attention, 36 with 2 MiB of recurrent and 48 KiB of convolution state."""
    state = RecurrentState((StateTensor((32, 128, 128), torch.float32), StateTensor((8192, 3))))
    kept = [PagedKv(2, 256, 256) if i % 4 == 3 else state for i in range(48)]
    layout = lay_out(kept, 16, BF16)
    assert layout.groups == (FULL, KvGroup("state", 1, every=4096))
    pages, states = layout.block_bytes(16, BF16)
    assert (pages, states) == (12 * 16 * 2 * 512 * 2, 36 * (2**21 + 2 * 24576))
    assert 0.5 < states / (pages / 16 * 4096) <= 1
    assert lay_out(kept, 16, BF16, every=100).groups[1].every == 112
    assert checkpoint_tokens([PagedKv(64, 256, 256), state], 16, BF16) == 256
    with pytest.raises(ValueError, match="no layer keeps keys and values"):
        lay_out([state], 16, BF16)


PRIME = 65_537


class Recurrent:
    """A model of two layers: pages hold token ids, the state a number that follows from all of them in their order.

    It says what it finds wrong, and takes the token after next from the number.
    """

    compiles = False

    def __init__(self) -> None:
        self.spec = SimpleNamespace(
            vocab_size=101, ropes=(RopeSpec(1e4, 2, max_position=200),), num_layers=2, num_kv_heads=1, head_dim=2
        )
        self.final_norm = SimpleNamespace(weight=torch.ones(2))
        self.kept = (PagedKv(1, 2, 2), RecurrentState((StateTensor((1,), torch.float64), StateTensor((2, 3)))))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nobody wants a vector")

    def layout(self, block_tokens: int, storage: Storage, every: int = 0) -> Layout:
        return lay_out(self.kept, block_tokens, storage, every)

    def __call__(
        self,
        ids: torch.Tensor,
        rotations: Any,
        slots: torch.Tensor,
        rows: AttentionRows,
        cache: KvCache,
        outputs: torch.Tensor | None,
        beside: Sequence[GroupStep],
    ) -> torch.Tensor:
        (keys, _, _), (numbers, convolution) = cache.layers
        keys.view(-1, 2)[slots] = ids[:, None].float()
        (step,) = beside
        found = torch.zeros(len(ids), dtype=torch.long)
        for row, live in enumerate(step.slots.tolist()):
            begin, end = step.rows.query_starts[row : row + 2].tolist()
            context = int(step.rows.context_lens[row])
            table = rows.tables[row, : -(-context // rows.block_tokens)].long()
            history = keys[table].reshape(-1, 2)[:context, 0].long().tolist()
            number = 1
            for token in history[: context - (end - begin)]:
                number = (number * 31 + token) % PRIME
            if context > end - begin:
                assert numbers[live, 0] == number and convolution[live].eq(number % 7).all(), "not this row's state"
            for place in range(begin, end):
                number = (number * 31 + int(ids[place])) % PRIME
                found[place] = number
            numbers[live, 0], convolution[live] = number, number % 7
        return found if outputs is None else found[outputs]

    def logits(self, found: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(found % 98 + 3, 101).float()


def alone(prompt: Sequence[int], count: int) -> list[int]:
    tokens, number = list(prompt), 1
    for token in prompt:
        number = (number * 31 + token) % PRIME
    for _ in range(count):
        tokens.append(number % 98 + 3)
        number = (number * 31 + tokens[-1]) % PRIME
    return tokens[len(prompt) :]


@pytest.mark.parametrize("plans_in_flight", [1, 3])
@pytest.mark.parametrize("pools", [(12, 2), (13, 4), (60, 30)])
def test_a_recurrent_model_goes_on_from_checkpoints(pools: tuple[int, int], plans_in_flight: int) -> None:
    """Chunks, decoding over checkpoints, preemption, siblings, hits behind a prompt and behind an output."""
    limits = Scheduler(max_rows=8, step_tokens=20, plans_in_flight=plans_in_flight)
    served = Served(cast(Any, Recurrent()), pools, limits, every=16)
    prompts = [[(7 * i + place * place) % 90 + 3 for place in range(5 + 9 * i)] for i in range(6)]
    wanted = [alone(prompt, 30) for prompt in prompts]
    for _ in range(2):
        assert served.generate(prompts, 30) == wanted
    assert served.generate(prompts[3:4], 30, n=3) == [wanted[3]] * 3
    before = served.core.metrics()["cached_tokens"]
    longer = [*prompts[5], *wanted[5][:25], 9, 9]
    assert served.generate([longer], 12) == [alone(longer, 12)]
    hit = served.core.metrics()["cached_tokens"] - before
    assert hit % 16 == 0 and (hit == 64 or pools[1] < 30), "50 tokens of prompt, 75 with its output"
    assert served.layout.groups == (FULL, KvGroup("state", 1, every=16)) and SHAPE.block_tokens == 8
