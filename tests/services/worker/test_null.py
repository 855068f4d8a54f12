import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.columns import pack_i32, unpack_i32
from common.config import load
from common.errors import ConfigError
from common.logprobs import Report
from common.model_source import ModelFiles
from common.pooling import Pooling
from common.protocol import RowStart, Sampling, StepPlan
from services.worker.null import NullEngine, vocab_size


@pytest.fixture
def engine() -> NullEngine:
    return NullEngine(load(None, ["scheduler.max_rows=8", "kv.blocks=10", "model.max_len=64"]), lambda stage: None)


def start(slot: int, last: int, **sampling: Any) -> RowStart:
    """A sequence whose prompt ends so."""
    return RowStart(slot, 900 + slot, pack_i32([1, last]), 2, 0, pack_i32([0]), Sampling(max_tokens=5, **sampling))


def step(
    engine: NullEngine, added: list[RowStart], slots: list[int], positions: list[int], samples: bytes
) -> list[int]:
    columns = {"slots": pack_i32(slots), "positions": pack_i32(positions), "counts": pack_i32([1] * len(slots))}
    return unpack_i32(engine.execute(StepPlan(1, added=added, samples=samples, **columns)).tokens()).tolist()


def test_facts_follow_the_settings(engine: NullEngine) -> None:
    facts = engine.facts
    assert (facts.num_blocks, facts.max_model_len, facts.vocab_size, facts.block_tokens) == (10, 64, 49152, 16)


def test_a_token_depends_on_prompt_and_position_only(engine: NullEngine) -> None:
    together = step(engine, [start(0, 70), start(5, 71)], [0, 5], [9, 9], b"\x01\x01")
    engine.reset()
    alone = step(engine, [start(3, 71)], [3], [9], b"\x01")
    assert together[1:] == alone
    assert together[0] != together[1]


def test_a_seed_counts_where_tokens_are_drawn(engine: NullEngine) -> None:
    greedy = [start(slot, 70, temperature=0.0, seed=slot) for slot in (0, 1)]
    drawn = [start(slot, 70, temperature=0.5, seed=slot // 4) for slot in (2, 3, 4)]
    told = step(engine, [*greedy, *drawn], [0, 1, 2, 3, 4], [9] * 5, b"\x01" * 5)
    assert told[0] == told[1] and told[2] == told[3] != told[4]


def test_only_sampling_rows_give_tokens(engine: NullEngine) -> None:
    assert len(step(engine, [start(0, 1), start(1, 2)], [0, 1], [0, 0], b"\x00\x01")) == 1
    assert step(engine, [], [], [], b"") == []


def test_with_drafts_a_sequence_says_the_same_in_fewer_steps() -> None:
    engine = NullEngine(load(None, ["scheduler.max_rows=8", "speculative.method=ngram"]), lambda stage: None)
    assert engine.facts.drafts == 4
    first = step(engine, [start(0, 70), start(5, 71)], [0, 5], [1, 1], b"\x01\x01")
    alone = [first, *(step(engine, [], [0, 5], [at, at], b"\x01\x01") for at in range(2, 40))]
    wanted = {0: [tokens[0] for tokens in alone], 5: [tokens[1] for tokens in alone]}
    engine.reset()
    first = step(engine, [start(0, 70), start(5, 71)], [0, 5], [1, 1], b"\x01\x01")
    said = {0: first[:1], 5: first[1:]}
    seen = set()
    for _ in range(8):
        columns = {"slots": pack_i32([5, 0]), "positions": pack_i32([90, 90]), "counts": pack_i32([5, 3])}
        done = engine.execute(StepPlan(1, samples=b"\x01\x01", drafting=2, **columns))
        counts, drafted = done.counts()
        assert drafted == bytes([4, 2]) and 1 <= counts[0] <= 5 and 1 <= counts[1] <= 3
        tokens = unpack_i32(done.tokens()).tolist()
        said[5] += tokens[: counts[0]]
        said[0] += tokens[counts[0] :]
        seen |= set(counts)
    assert len(seen) > 1 and all(tokens == wanted[slot][: len(tokens)] for slot, tokens in said.items())


def test_a_prompt_that_is_pooled_has_a_vector_of_its_own() -> None:
    engine = NullEngine(load(None, ["scheduler.max_rows=8", "kv.blocks=10"]), lambda stage: None)
    rows, columns = [], {"slots": pack_i32([0, 5]), "positions": pack_i32([0, 0]), "counts": pack_i32([3, 2])}
    for slot, pooling in ((0, Pooling()), (5, Pooling(dimensions=4, normalize=False))):
        sampling = Sampling(0, report=Report(pooling=pooling))
        rows.append(RowStart(slot, slot, pack_i32([3, 4, 5]), 3, 0, pack_i32([0]), sampling))
    told = engine.execute(StepPlan(1, added=rows, samples=b"\0\0", **columns)).logprobs()
    assert told is not None and told.vectors.keys() == {0}, "the other one's prompt is not whole"
    columns = {"slots": pack_i32([5]), "positions": pack_i32([2]), "counts": pack_i32([1])}
    rest = engine.execute(StepPlan(2, samples=b"\0", **columns)).logprobs()
    assert rest is not None and rest.vectors.keys() == {0} and len(rest.vectors[0]) == 16
    whole = np.frombuffer(told.vectors[0], np.float32)
    assert len(whole) == engine.facts.embedding.size and np.linalg.norm(whole) == pytest.approx(1)
    assert (np.frombuffer(rest.vectors[0], np.float32)[0] > 0) == (whole[0] > 0)


def test_the_vocabulary_size_is_read_or_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 99}))
    assert vocab_size(ModelFiles("folder", tmp_path, "x")) == 99
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="vocabulary"):
        vocab_size(ModelFiles("folder", tmp_path, "x"))


def test_a_prompt_scripts_its_own_answer() -> None:
    settings = ["scheduler.max_rows=8", "kv.blocks=10", "model.max_len=64", "worker.null_echo=7"]
    engine = NullEngine(load(None, settings), lambda stage: None)
    assert engine.facts.eos_token_ids == (7,)
    prompt = [7, 1, 7, 40, 41, 7, 5]
    row = RowStart(2, 1, pack_i32([*prompt, 40]), len(prompt), 0, pack_i32([0]), Sampling(max_tokens=5))
    assert step(engine, [row], [2], [len(prompt)], b"\x01") == [41]
    assert step(engine, [], [2], [len(prompt) + 1], b"\x01") == [7]
    assert step(engine, [start(0, 1)], [0], [1], b"\x01") == [7]  # no script: it ends at once
