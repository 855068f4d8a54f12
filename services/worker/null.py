"""The null engine: canned tokens after a settable time, no torch. Load tests of the three other services use it.

Each token is a function of the row's sequence and position only, so a re-planned sequence repeats itself. With
`worker.null_echo` a prompt scripts its answer: what it has between its last two tokens of that id, which also ends it.
"""

import time
from collections.abc import Callable

import msgspec
import numpy as np

from common.config import Config
from common.errors import ConfigError
from common.gguf_metadata import read_gguf
from common.model_source import ModelFiles, resolve
from common.protocol import ModelFacts, Progress, RowStart, StepPlan

FIRST_TOKEN, TOKEN_RANGE = 300, 700  # ordinary words in every vocabulary that is larger than 1,000
DEFAULT_MAX_LEN, DEFAULT_BLOCKS = 8192, 65_536


class Done:
    """A step that is over."""

    failed = b""

    def __init__(self, tokens: bytes) -> None:
        self._tokens = tokens

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
            eos_token_ids=(config.worker.null_echo,) if config.worker.null_echo >= 0 else (),
            block_tokens=config.kv.block_tokens,
            num_blocks=config.kv.blocks or DEFAULT_BLOCKS,
        )
        self.max_rows = config.scheduler.max_rows
        self._step_s = config.worker.step_us / 1e6
        self._salt = np.zeros(self.max_rows, np.int32)
        self._echo = config.worker.null_echo
        self._scripts: dict[int, tuple[int, list[int]]] = {}  # by slot: length of the prompt, tokens of the answer

    def execute(self, plan: StepPlan) -> Done:
        end_s = time.perf_counter() + self._step_s
        for row in plan.added:
            self._salt[row.slot] = row.seq_id % TOKEN_RANGE
            if self._echo >= 0:
                self._scripts[row.slot] = row.num_prompt, script(row, self._echo)
        slots = np.frombuffer(plan.slots, np.int32)
        ends = np.frombuffer(plan.positions, np.int32) + np.frombuffer(plan.counts, np.int32)
        tokens = (self._salt[slots] + ends * 31) % TOKEN_RANGE + FIRST_TOKEN
        if self._echo >= 0:
            for place, (slot, end) in enumerate(zip(slots.tolist(), ends.tolist(), strict=True)):
                num_prompt, answer = self._scripts[slot]
                index = end - num_prompt
                tokens[place] = answer[index] if 0 <= index < len(answer) else self._echo
        sampled = tokens[np.frombuffer(plan.samples, np.bool_)].astype(np.int32).tobytes()
        if self._step_s:
            time.sleep(max(0.0, end_s - time.perf_counter()))
        return Done(sampled)

    def figures(self) -> dict[str, float]:
        return {}

    def reset(self) -> None:
        self._salt[:] = 0

    def close(self) -> None: ...


def script(row: RowStart, mark: int) -> list[int]:
    """What the prompt has between its last two tokens `mark`; nothing if there are not two."""
    prompt = np.frombuffer(row.tokens, np.int32)[: row.num_prompt]
    places = np.flatnonzero(prompt == mark)[-2:].tolist()
    return prompt[places[0] + 1 : places[1]].tolist() if len(places) == 2 else []


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
