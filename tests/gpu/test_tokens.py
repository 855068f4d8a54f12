"""The engine's tokens on the GPU against transformers: every way of running a step says the same."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from common.protocol import Sampling
from services.worker import graphs
from tests.gpu.conftest import EXACT, ROUNDED, WITH_FP8_CACHE
from tests.services.worker import spelled

NEAR = 0.01  # logits of fp32 whose order sums in another order may turn; they deviate by about 1
LEVELS = {"eager": ("worker.compile_level=0",), "graphs": ("worker.compile_level=3",)}


def make_prompts(number: int, longest: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (number,), generator=generator).tolist()
    return [torch.randint(3, 4096, (length,), generator=generator).tolist() for length in lengths]


def agreement(
    small: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], margin: float = 0.0
) -> tuple[float, int, int]:
    """Share of clear positions whose token is the fp32 reference's best, given the same tokens before; their number,
    and the number of all. Clear: the reference's margin exceeds `margin`, or without one three standard deviations of
    what bf16 moves it by, which is the square root of two times the error of a logit in transformers' own bf16 run at
    that position."""
    longest = max(len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True))
    padded = [
        [*prompt, *output, *[0] * (longest - len(prompt) - len(output))]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    exact = small.logits(padded)
    place = torch.arange(longest)
    own = torch.stack(
        [(place >= len(p) - 1) & (place < len(p) + len(o) - 1) for p, o in zip(prompts, outputs, strict=True)]
    ).cuda()
    wanted = torch.tensor(padded).cuda().roll(-1, 1)[own]
    exact = exact[own]
    assert bool(torch.isfinite(exact).all())
    if margin:
        bound = torch.full_like(exact[:, 0], margin)
    else:
        bound = 3 * 2**0.5 * (exact - small.logits(padded, torch.bfloat16)[own]).square().mean(-1).sqrt()
    best = exact.topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > bound
    right = best.indices[:, 0] == wanted
    wrong = (clear & ~right).nonzero().flatten().tolist()
    if wrong:
        rows = torch.arange(len(padded)).cuda()[:, None].expand_as(own)[own]
        print(
            "wrong", [(int(rows[i]), i, float((best.values[i, 0] - best.values[i, 1]) / bound[i])) for i in wrong[:12]]
        )
    return int(right[clear].sum()) / max(1, int(clear.sum())), int(clear.sum()), len(right)


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("level", LEVELS)
def test_256_rows_against_fp32(make_small: Callable[[str], Any], name: str, level: str) -> None:
    small, prompts = make_small(name), make_prompts(256, 120)
    outputs = small.engine(*LEVELS[level]).generate(prompts, 41)
    share, clear, positions = agreement(small, prompts, outputs)
    print(f"{name} {level} batch 256: {share:.4%} of {clear} clear of {positions} positions")
    assert positions >= 10_000 and clear > positions // 4 and share >= 0.99


@pytest.mark.parametrize("level", LEVELS)
def test_one_row_against_fp32(make_small: Callable[[str], Any], level: str) -> None:
    small, prompts = make_small("qwen3"), make_prompts(10, 120, seed=1)
    driver = small.engine(*LEVELS[level])
    outputs = [driver.generate([prompt], 1000)[0] for prompt in prompts]
    share, clear, positions = agreement(small, prompts, outputs)
    print(f"qwen3 {level} batch 1: {share:.4%} of {clear} clear of {positions} positions")
    assert positions >= 10_000 and clear > positions // 4 and share >= 0.99


@pytest.mark.parametrize("name", EXACT)
def test_float32_is_exact(make_small: Callable[[str], Any], name: str) -> None:
    """Greedy tokens of fp32 equal transformers' in any chunking, replayed or not."""
    small, prompts = make_small(name), make_prompts(12, 300, seed=2)
    few = "model.dtype=float32", "scheduler.max_rows=16"
    for settings, chunk in ((("worker.compile_level=0",), 2048), (("worker.compile_level=3",), 64)):
        outputs = small.engine(*few, *settings).generate(prompts, 30, chunk=chunk)
        share, clear, positions = agreement(small, prompts, outputs, NEAR)
        assert share == 1.0 and clear > positions * 3 // 4


def test_chunks_far_in_a_prompt_are_replayed(make_small: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In layouts whose attention is cut into parts: tokens of fp32 equal transformers'."""
    monkeypatch.setattr(graphs, "LONG_CONTEXT", 256)
    replayed: list[graphs.GraphKey] = []
    replay = graphs.Graphs.replay
    monkeypatch.setattr(
        graphs.Graphs, "replay", lambda own, key, staged: replayed.append(key) or replay(own, key, staged)
    )
    small = make_small("qwen3")
    prompts = [prompt * 14 for prompt in make_prompts(6, 130, seed=8)]
    outputs = small.engine("model.dtype=float32", *LEVELS["graphs"]).generate(prompts, 12, chunk=100)
    assert agreement(small, prompts, outputs, NEAR)[0] == 1.0
    assert any(key.long for key in replayed) and any(key.chunk and not key.long for key in replayed)


def test_replayed_rows_draw_what_eager_rows_draw(make_small: Callable[[str], Any]) -> None:
    small, prompts = make_small("qwen3"), make_prompts(24, 60, seed=3)
    kinds = [
        Sampling(999, temperature=0.0),
        Sampling(999, seed=1, temperature=0.8),
        Sampling(999, seed=2, temperature=1.2, top_p=0.9),
        Sampling(999, seed=3, top_k=20, min_p=0.01),
        Sampling(999, seed=4, temperature=0.7, frequency_penalty=0.5, presence_penalty=0.2),
        Sampling(999, temperature=0.0, repetition_penalty=1.3, logit_bias=((5, 3.0),), min_tokens=5),
    ]
    sampling = [kinds[i % len(kinds)] for i in range(24)]
    eager, replayed = (
        small.engine("model.dtype=float32", *settings).generate(prompts, 40, sampling) for settings in LEVELS.values()
    )
    same = sum(left == right for left, right in zip(eager, replayed, strict=True))
    assert same >= 23, f"{same} of 24 rows"


@pytest.mark.parametrize("name", WITH_FP8_CACHE)
def test_an_8_bit_cache_against_fp32(make_small: Callable[[str], Any], name: str) -> None:
    """Four bits of a number's eight are gone: some clear positions turn. Whether kernels do what their ops mean is
    what the next tests show."""
    small, prompts = make_small(name), make_prompts(64, 120, seed=5)
    driver = small.engine("kv.dtype=fp8", *LEVELS["graphs"])
    assert driver.engine.facts.kv_dtype.startswith("float8_e4m3")
    share, clear, positions = agreement(small, prompts, driver.generate(prompts, 41))
    print(f"{name} fp8 cache: {share:.4%} of {clear} clear of {positions} positions")
    assert clear >= 200 and share >= 0.8


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_replayed_rows_of_an_8_bit_cache_say_what_eager_rows_say(
    make_small: Callable[[str], Any], kernels: str
) -> None:
    """Sums in another order, of fp32 even, now and then cross a border between two 8-bit floats: few rows may part."""
    small, prompts = make_small("qwen3"), make_prompts(24, 60, seed=6)
    providers = f"worker.kernels={['torch'] if kernels == 'torch' else ['triton', 'torch']}".replace("'", '"')
    eager, replayed = (
        small.engine("model.dtype=float32", "kv.dtype=fp8", *settings).generate(prompts, 40)
        for settings in ((*LEVELS["eager"], providers), LEVELS["graphs"])
    )
    same = sum(left == right for left, right in zip(eager, replayed, strict=True))
    print(f"{same} of 24 rows are the same")
    assert same >= 20


def test_the_same_request_alone_and_in_a_crowd(make_small: Callable[[str], Any]) -> None:
    small, prompts = make_small("llama"), make_prompts(33, 80, seed=4)
    sampling = [Sampling(999, seed=i, temperature=0.9) for i in range(33)]
    driver = small.engine("model.dtype=float32")
    crowd = driver.generate(prompts, 30, sampling)
    alone = [driver.generate([prompts[i]], 30, [sampling[i]])[0] for i in range(0, 33, 8)]
    assert sum(crowd[i] == alone[j] for j, i in enumerate(range(0, 33, 8))) >= 4


@pytest.mark.parametrize("level", LEVELS)
def test_rows_under_a_grammar(make_small: Callable[[str], Any], level: str) -> None:
    """Among 64 rows, drawn behind the step with two plans in flight; the other rows' tokens are those without them."""
    small, prompts = make_small("qwen3"), make_prompts(64, 60)
    driver = small.engine(*LEVELS[level])
    driver.engine._runner.held.grammars = spelled.grammars(4096)
    expression = spelled.regex("[a-z]{3,9}-[0-9]{4,6}")
    free = [Sampling(100, seed=slot, ignore_eos=True) for slot in range(64)]
    bound = [Sampling(100, seed=slot, temperature=slot % 3 * 0.5, grammar=expression) for slot in range(64)]
    mixed = [bound[slot] if slot % 4 == 0 else free[slot] for slot in range(64)]
    alone, among = driver.generate(prompts, 20, free), driver.generate(prompts, 20, mixed)
    texts = [spelled.text_of(among[slot]) for slot in range(0, 64, 4)]
    assert all(re.fullmatch("[a-z]{3,9}-[0-9]{4,6}", text) for text in texts), texts
    assert [among[slot] for slot in range(64) if slot % 4] == [alone[slot] for slot in range(64) if slot % 4]
