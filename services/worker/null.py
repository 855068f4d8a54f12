"""The null engine: canned tokens after a settable time, no torch. Load tests of the three other services use it.

Each token is a function of the row's prompt, of its seed if it is not greedy, and of the position: a sequence that is
planned again repeats itself, and a request has the same answer from every engine. With `worker.null_echo` a prompt
scripts its answer: what it has between its last two tokens of that id, which also ends it. With drafts (any
speculative.method) some hold and some do not, which depends on sequence and position, too.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from common.config import Config
from common.errors import ConfigError
from common.gguf_metadata import read_gguf
from common.logprobs import Report, StepLogprobs
from common.model_source import ModelFiles, resolve
from common.pooling import Embedding, Pooling
from common.protocol import ModelFacts, Progress, RowFault, RowStart, StepPlan

Ints = npt.NDArray[np.integer[Any]]
FIRST_TOKEN, TOKEN_RANGE = 300, 700  # ordinary words in every vocabulary that is larger than 1,000
DEFAULT_MAX_LEN, DEFAULT_BLOCKS = 8192, 65_536
VECTOR_SIZE = 64


class Done:
    """A step that is over."""

    failed = b""
    faults: Sequence[RowFault] = ()

    def __init__(self, tokens: bytes, counts: tuple[bytes, bytes], logprobs: StepLogprobs | None = None) -> None:
        self._tokens, self._counts, self._logprobs = tokens, counts, logprobs

    def settle(self) -> None: ...

    def ready(self) -> bool:
        return True

    def tokens(self) -> bytes:
        return self._tokens

    def counts(self) -> tuple[bytes, bytes]:
        return self._counts

    def logprobs(self) -> StepLogprobs | None:
        return self._logprobs


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
            drafts=config.speculative.drafts,
            draft_rows=config.speculative.max_rows,
            embedding=Embedding(VECTOR_SIZE, lengths=()),
        )
        self.max_rows = config.scheduler.max_rows
        self._step_s = config.worker.step_us / 1e6
        self._salt = np.zeros(self.max_rows, np.int32)
        self._known = np.zeros(self.max_rows, np.int32)  # tokens of each row that has sampled
        self._reports: dict[int, Report] = {}  # by slot
        self._prompts: dict[int, Ints] = {}  # of those
        self._echo = config.worker.null_echo
        self._scripts: dict[int, tuple[int, list[int]]] = {}  # by slot: length of the prompt, tokens of the answer

    def profile(self, folder: Path | None) -> None:
        """There is no device whose work could be recorded."""

    def execute(self, plan: StepPlan) -> Done:
        end_s = time.perf_counter() + self._step_s
        for row in plan.added:
            self._salt[row.slot] = salt(row)
            self._start_report(row)
            if self._echo >= 0:
                self._scripts[row.slot] = row.num_prompt, script(row, self._echo)
        slots, planned = np.frombuffer(plan.slots, np.int32), np.frombuffer(plan.counts, np.int32)
        samples, first = np.frombuffer(plan.samples, np.bool_), plan.drafting
        ends = np.frombuffer(plan.positions, np.int32) + planned
        ends[:first] = self._known[slots[:first]]
        given = np.ones(len(slots), np.int32)
        given[:first] = (self._salt[slots[:first]] + ends[:first]) * 7 % 5 % planned[:first] + 1
        self._known[slots] = ends + given
        slots, ends, given, planned = slots[samples], ends[samples], given[samples], planned[samples]
        ahead = np.arange(given.sum()) - np.repeat(np.cumsum(given) - given, given)
        rows, places = np.repeat(slots, given), np.repeat(ends, given) + ahead
        tokens = (self._salt[rows] + places * 31) % TOKEN_RANGE + FIRST_TOKEN
        if self._echo >= 0:
            self._recite(rows, places, tokens)
        logprobs = self._logprobs(plan, rows, tokens) if self._reports else None
        counts = b"", b""
        if first:
            planned[first:] = 1
            counts = given.astype(np.uint8).tobytes(), (planned - 1).astype(np.uint8).tobytes()
        if self._step_s:
            time.sleep(max(0.0, end_s - time.perf_counter()))
        return Done(tokens.astype(np.int32).tobytes(), counts, logprobs)

    def _start_report(self, row: RowStart) -> None:
        self._reports.pop(row.slot, None)
        if row.sampling.report != Report():
            self._reports[row.slot] = row.sampling.report
            self._prompts[row.slot] = np.frombuffer(row.tokens, np.int32)[: row.num_prompt]

    def _logprobs(self, plan: StepPlan, slots: Ints, tokens: Ints) -> StepLogprobs:
        """`slots`: of each token."""
        drawn = [
            record(token, self._reports[slot].top, self._reports[slot].named)
            for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True)
            if slot in self._reports
        ]
        prompts: dict[int, tuple[int, bytes]] = {}
        vectors: dict[int, bytes] = {}
        columns = (np.frombuffer(column, np.int32).tolist() for column in (plan.slots, plan.positions, plan.counts))
        for place, (slot, position, count) in enumerate(zip(*columns, strict=True)):
            report = self._reports.get(slot, Report())
            targets = self._prompts[slot][position + 1 : position + count + 1].tolist() if report.prompt >= 0 else ()
            if targets and place >= plan.drafting:
                prompts[place] = position + 1, b"".join(record(token, report.prompt) for token in targets)
            if report.pooling is not None and position + count == len(self._prompts[slot]):
                vectors[place] = vector(self._prompts[slot], report.pooling)
        return StepLogprobs(b"".join(drawn), prompts, vectors)

    def _recite(self, rows: Ints, places: Ints, tokens: Ints) -> None:
        """Token by token of a step: what the scripts say in place of `tokens`."""
        for idx, (slot, place) in enumerate(zip(rows.tolist(), places.tolist(), strict=True)):
            num_prompt, answer = self._scripts[slot]
            tokens[idx] = answer[place - num_prompt] if 0 <= place - num_prompt < len(answer) else self._echo

    def figures(self) -> dict[str, float]:
        return {}

    def reset(self) -> None:
        self._salt[:] = 0

    def close(self) -> None: ...


def record(token: int, top: int, named: tuple[int, ...] = ()) -> bytes:
    """Log-probabilities (common/logprobs.py) of a token that is the best one, before its successors or named ones."""
    if top < 0:
        return b""
    ids = [token, *(named or range(token, token + top))]
    values = [-0.5, *(-0.5 - place for place in range(top))]
    return np.array([1, *ids], np.int32).tobytes() + np.array(values, np.float32).tobytes()


def vector(prompt: Ints, pooling: Pooling) -> bytes:
    """One that the prompt alone decides."""
    numbers = np.random.default_rng(prompt.tolist()).standard_normal(pooling.dimensions or VECTOR_SIZE)
    length = float(np.linalg.norm(numbers)) if pooling.normalize else 1.0
    return (numbers / length).astype(np.float32).tobytes()


def salt(row: RowStart) -> int:
    """What tells this row's tokens from those of others."""
    seed = row.sampling.seed if row.sampling.temperature > 0 else 0
    return (zlib.crc32(row.tokens[: 4 * row.num_prompt]) + seed) % TOKEN_RANGE


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
