"""The null engine: canned tokens after a settable time, no torch. Load tests of the three other services use it.

Each token is a function of the row's sequence and position only, so a re-planned sequence repeats itself.
"""

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from common.config import Config
from common.errors import ConfigError
from common.gguf_metadata import read_gguf
from common.model_source import ModelFiles, resolve
from common.protocol import ModelFacts, Progress, RowFault, StepPlan

FIRST_TOKEN, TOKEN_RANGE = 300, 700  # ordinary words in every vocabulary that is larger than 1,000
DEFAULT_MAX_LEN, DEFAULT_BLOCKS = 8192, 65_536


class Done:
    """A step that is over."""

    failed = b""
    faults: Sequence[RowFault] = ()

    def __init__(self, tokens: bytes) -> None:
        self._tokens = tokens

    def settle(self) -> None: ...

    def ready(self) -> bool:
        return True

    def tokens(self) -> bytes:
        return self._tokens


class NullEngine:
    def __init__(self, config: Config, report: Callable[[Progress], None], instance: int = 0) -> None:
        report(Progress("null engine"))
        files = resolve(config.model.source)
        self.facts = ModelFacts(
            name=config.model.name or files.name,
            architecture="null",
            vocab_size=vocab_size(files),
            max_model_len=config.model.max_len or DEFAULT_MAX_LEN,
            eos_token_ids=(),
            block_tokens=config.kv.block_tokens,
            num_blocks=config.kv.blocks or DEFAULT_BLOCKS,
        )
        self.max_rows = config.scheduler.max_rows
        self._step_s = config.worker.step_us / 1e6
        self._salt = np.zeros(self.max_rows, np.int32)

    def execute(self, plan: StepPlan) -> Done:
        end_s = time.perf_counter() + self._step_s
        for row in plan.added:
            self._salt[row.slot] = row.seq_id % TOKEN_RANGE
        slots = np.frombuffer(plan.slots, np.int32)
        ends = np.frombuffer(plan.positions, np.int32) + np.frombuffer(plan.counts, np.int32)
        tokens = (self._salt[slots] + ends * 31) % TOKEN_RANGE + FIRST_TOKEN
        sampled = tokens[np.frombuffer(plan.samples, np.bool_)].astype(np.int32).tobytes()
        if self._step_s:
            time.sleep(max(0.0, end_s - time.perf_counter()))
        return Done(sampled)

    def figures(self) -> dict[str, float]:
        return {}

    def reset(self) -> None:
        self._salt[:] = 0

    def close(self) -> None: ...


def vocab_size(files: ModelFiles) -> int:
    """Number of token ids of a model, without reading its weights. Raises ConfigError if the files do not tell."""
    if files.kind == "gguf":
        tokens = read_gguf(files.path).metadata.get("tokenizer.ggml.tokens")
        found: object = len(tokens) if isinstance(tokens, list) else None
    else:
        found = msgspec.json.decode((files.path / "config.json").read_bytes()).get("vocab_size")
    if not isinstance(found, int):
        raise ConfigError(f"{files.path} does not tell its vocabulary size")
    return found
