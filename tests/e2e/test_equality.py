"""Greedy tokens of the bundled model equal transformers' on the same weights, however the work is cut and ordered.

The real scheduler core drives the real engine in one process, with two plans in flight, in the exact mode (float32).
"""

import random

import msgspec
import pytest
import torch

from common.columns import pack_i32, unpack_i32, unpack_u64
from common.config import Config, load
from common.protocol import Admit, FinishReason, Sampling, StepResult, WorkerReady
from services.scheduler.core import SchedulerCore
from services.scheduler.events import SendPlan, SendRefused, SendTokens
from services.worker.model_engine import ModelEngine
from services.worker.source import open_model

OUTPUT = 8
FEW = 3  # one at a time: the prompt's own step, and two that decode
LENGTHS = [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 129, 260]
BLOCKS = 512


@pytest.fixture(scope="module")
def engine() -> ModelEngine:
    settings = [
        "model.dtype=float32",
        "worker.threads=1",
        "scheduler.max_rows=32",
        f"kv.blocks={BLOCKS}",
        "model.max_len=2048",
    ]
    return ModelEngine(load(None, settings), lambda stage: None)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Real words in random order, all with the beginning that prompts of more than 40 tokens share."""
    source = random.Random(5)
    common = [source.randrange(300, 20_000) for _ in range(40)]
    drawn = [[source.randrange(300, 20_000) for _ in range(length)] for length in LENGTHS]
    return [common + prompt[40:] if len(prompt) > 40 else prompt for prompt in drawn]


def generate(
    engine: ModelEngine,
    config: Config,
    prompts: list[list[int]],
    num_blocks: int = BLOCKS,
    at_once: bool = True,
    max_tokens: int = OUTPUT,
) -> tuple[list[list[int]], SchedulerCore]:
    """Output tokens of each prompt. `at_once` False: the next prompt is admitted when the one before has ended."""
    engine.reset()
    core = SchedulerCore(config.scheduler, config.kv, seed=1)
    facts = msgspec.structs.replace(engine.facts, num_blocks=num_blocks)
    core.handle([WorkerReady(facts, engine.max_rows)], 0.0)
    outputs: list[list[int]] = [[] for _ in prompts]
    admits = [Admit(i, pack_i32(p), Sampling(max_tokens=max_tokens, temperature=0.0)) for i, p in enumerate(prompts)]
    groups = [admits] if at_once else [[admit] for admit in admits]
    for group in groups:
        run(core, engine, group, outputs)
    core.check()
    return outputs, core


def run(core: SchedulerCore, engine: ModelEngine, admits: list[Admit], outputs: list[list[int]]) -> None:
    events: list = list(admits)
    waiting = []
    ended = 0
    while ended < len(admits):
        for effect in core.handle(events, 0.0):
            assert not isinstance(effect, SendRefused), effect
            if isinstance(effect, SendPlan):
                waiting.append((effect.plan.step, engine.execute(effect.plan)))
            elif isinstance(effect, SendTokens):
                batch = effect.batch
                for seq_id, token in zip(unpack_u64(batch.seq_ids), unpack_i32(batch.tokens), strict=True):
                    outputs[seq_id].append(token)
                assert all(f.reason in (FinishReason.EOS, FinishReason.LENGTH) for f in batch.finished)
                ended += len(batch.finished)
        step, pending = waiting.pop(0) if waiting else (0, None)
        events = [StepResult(step, pending.tokens())] if pending else []
        assert pending or ended == len(admits), "nothing runs and not all have ended"
    for step, pending in waiting:  # a step planned before the last end was seen
        core.handle([StepResult(step, pending.tokens())], 0.0)


@pytest.fixture(scope="module")
def drawn(engine: ModelEngine, prompts: list[list[int]]) -> list[list[int]]:
    """What the engine generates, all prompts at once."""
    return generate(engine, load(None, ["kv.prefix_cache=false"]), prompts)[0]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], drawn: list[list[int]]) -> list[list[int]]:
    """Transformers' greedy token at each place of `drawn`, one prompt at a time, given all tokens before it.

    Where that is `drawn` to its end, it is what transformers would generate: each token follows from those before.
    """
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds: only where it runs

    source = open_model("bundled")
    model = LlamaForCausalLM(LlamaConfig(**source.config))
    weights = {name: tensor.dense(torch.float32) for name, tensor in source.tensors.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (set(missing), unexpected) == ({"lm_head.weight"}, [])
    model.tie_weights()
    model.eval()
    greedy = []
    with torch.inference_mode():
        for prompt, output in zip(prompts, drawn, strict=True):
            ids = torch.tensor([prompt + output[:-1]])
            greedy.append(model(ids, logits_to_keep=len(output)).logits[0].argmax(-1).tolist())
    return greedy


def firsts(outputs: list[list[int]]) -> list[list[int]]:
    return [output[:FEW] for output in outputs]


def test_all_at_once(drawn: list[list[int]], expected: list[list[int]]) -> None:
    assert drawn == expected
    assert {len(output) for output in drawn} == {OUTPUT}


def test_one_at_a_time(engine: ModelEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    config = load(None, ["kv.prefix_cache=false"])
    assert generate(engine, config, prompts, at_once=False, max_tokens=FEW)[0] == firsts(expected)


def test_in_chunks_of_64(engine: ModelEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    config = load(None, ["kv.prefix_cache=false", "scheduler.chunk_tokens=64", "scheduler.step_tokens=256"])
    assert generate(engine, config, prompts)[0] == expected


def test_with_prefix_hits(engine: ModelEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    config = load(None, [])
    outputs, core = generate(engine, config, prompts, at_once=False, max_tokens=FEW)
    assert outputs == firsts(expected)
    longer = sum(len(prompt) > 40 for prompt in prompts)
    assert core.metrics()["cached_tokens"] >= 32 * (longer - 1)
    # All again: now whole prompts are found, up to their last block.
    again, core = generate(engine, config, [*prompts[-6:], *prompts[-6:]], at_once=False, max_tokens=FEW)
    assert again == [*firsts(expected[-6:]), *firsts(expected[-6:])]
    assert core.metrics()["cached_tokens"] > sum(len(prompt) - 17 for prompt in prompts[-6:])


def test_with_preemption(engine: ModelEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Hardly more blocks than the longest prompt needs, which comes first: rows are put back and computed again."""
    blocks = len(prompts[-1]) // 16 + 4
    config = load(None, ["kv.prefix_cache=false"])
    outputs, core = generate(engine, config, prompts[::-1], num_blocks=blocks)
    assert outputs == expected[::-1]
    assert core.metrics()["preemptions"] >= 3
