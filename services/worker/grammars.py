"""Rows whose output must match a grammar: their matchers, and which tokens each may draw next. Owner: the runner.

A row's matcher is made by threads while its prompt runs, from one that is kept per grammar, and then knows the row's
output so far, whoever drew it. What is not ready, or cannot go on, is that row's fault and nobody else's. Limits count
work, not time: all ranks of a group come to the same masks.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from common.config import Model
from common.errors import ConfigError
from common.grammar import NOTHING, fault_of, make_matcher
from common.model_source import resolve
from common.protocol import Grammar, RowStart, StepPlan
from common.tokenizer_files import dialects_of, open_tokenizer
from common.vocabulary import build
from services.worker.state import Ints, Step

log = logging.getLogger("worker")
Bits = npt.NDArray[np.int32]

PATIENCE_S = 0.005  # that a step waits for matchers of new rows
FOLLOWING_S = 600.0  # at ranks whose row goes on if that of rank 0 does
KEPT_BYTES = 1 << 21  # texts of grammars whose matchers are kept; a matcher has some hundred bytes for each of these
MAKERS = 2  # threads


class Words(TokenizerWrapper):
    """A model's tokenizer as llguidance asks for it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, model: Model, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Raises ConfigError if the model has none, or no end. May take seconds."""
        if not eos_ids:
            raise ConfigError("the model has no end-of-sequence token")
        files = resolve(model.source)
        opened = open_tokenizer(files, model.trust_remote_code)
        tokenizer, vocabulary = opened.tokenizer, build(opened.tokenizer)
        vocabulary.widen(vocab_size)
        # Markers of calls and reasoning are part of what a grammar may ask for, whatever tokens they are.
        special = vocabulary.showing(dialects_of(files, model, opened).markers).special
        self.eos_token_id = eos_ids[0]
        self.tokens = vocabulary.pieces[:vocab_size]
        self.special_token_ids = sorted({token for token in (*special, *eos_ids) if token < vocab_size})
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        """How the model would write a text that must come."""
        return list(self._encode(text, add_special_tokens=False).ids)


def open_words(model: Model, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """Raises ConfigError."""
    return LLTokenizer(Words(model, vocab_size, eos_ids), n_vocab=vocab_size, eos_token=list(eos_ids))


def no_words() -> LLTokenizer:
    raise ConfigError("this worker has no tokenizer")


class Bound:
    """One row under a grammar. `over`: an end was drawn; what is drawn after it means nothing."""

    __slots__ = ("ends", "eos", "fault", "grammar", "ignores_eos", "making", "min_tokens", "num_prompt", "over")

    def __init__(self, row: RowStart, making: "Future[LLMatcher]", eos: frozenset[int], vocab_size: int) -> None:
        sampling = row.sampling
        assert sampling.grammar is not None
        self.grammar, self.making, self.num_prompt = sampling.grammar, making, row.num_prompt
        self.eos = eos
        self.ends = eos | {token for token in sampling.stop_token_ids if token < vocab_size}
        self.ignores_eos, self.min_tokens = sampling.ignore_eos, sampling.min_tokens
        self.over, self.fault = False, False


class Masks(NamedTuple):
    """bits: [S, ceil(V / 32)], bit t % 32 of word t // 32 for each token t that may come. faults: by place of S."""

    bits: Bits
    faults: dict[int, str]


class Grammars:
    """`words` gives the vocabulary; it is called by a thread at once. Everything else is the engine's thread.

    leads: False at the ranks of a group whose faults nobody hears of: they wait longer and give up later than rank 0.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Sequence[int],
        words: Callable[[], LLTokenizer] = no_words,
        threads: int = 1,
        leads: bool = True,
    ) -> None:
        self.vocab_size, self._eos = vocab_size, frozenset(token for token in eos_ids if token < vocab_size)
        self._leads, self._patience_s = leads, PATIENCE_S if leads else FOLLOWING_S
        self._makers = ThreadPoolExecutor(MAKERS, "grammar")
        self._words = self._makers.submit(words)
        self._threads = threads
        self._kept: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._kept_bytes = 0
        self._rows: dict[int, Bound] = {}

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(self._threads)

    def ready(self) -> None:
        """Waits for the vocabulary. Without one, rows that need it end with the reason."""
        if (error := self._words.exception()) is not None:
            if not isinstance(error, ConfigError):
                raise error
            log.info("structured output is not available: %s", error)

    def apply(self, plan: StepPlan) -> None:
        """Rows that go and rows that come, as `Rows.apply`."""
        if self._rows:
            for slot in np.frombuffer(plan.removed, np.int32).tolist():
                self._leave(slot)
        for row in plan.added:
            if row.sampling.grammar is not None:
                making = self._makers.submit(self._make, self._base(row.sampling.grammar), row)
                self._rows[row.slot] = Bound(row, making, self._eos, self.vocab_size)

    def reset(self) -> None:
        """Forgets all rows."""
        for slot in list(self._rows):
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        if (bound := self._rows.pop(slot, None)) is not None:
            bound.making.cancel()

    def _base(self, grammar: Grammar) -> "Future[LLMatcher]":
        """The kept matcher that rows' own are copied from; never fed."""
        found = self._kept.get(grammar)
        if found is None:
            found = self._kept[grammar] = self._makers.submit(self._begin, grammar)
            self._kept_bytes += len(grammar.text)
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= len(self._kept.popitem(last=False)[0].text)
        self._kept.move_to_end(grammar)
        return found

    def _begin(self, grammar: Grammar) -> LLMatcher:
        """In a thread. The first mask is made too, since it is the dearest."""
        matcher = make_matcher(grammar, self._words.result(), patient=not self._leads)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

    def _make(self, base: "Future[LLMatcher]", row: RowStart) -> LLMatcher:
        """In a thread: after a preemption, or another worker's end, with the output so far."""
        matcher = base.result().deep_copy()
        output = np.frombuffer(row.tokens, np.int32)[row.num_prompt :]
        if len(output):
            matcher.consume_tokens(output.tolist())
        return matcher

    def bound(self, step: Step) -> Ints:
        """Places in the step of rows that sample under a grammar."""
        if not self._rows:
            return np.zeros(0, np.int64)
        under = np.fromiter((slot in self._rows for slot in step.slots.tolist()), np.bool_, len(step.slots))
        return np.flatnonzero(under & step.samples)

    def rows(self, slots: Ints) -> list[Bound]:
        return [self._rows[slot] for slot in slots.tolist()]

    def feed(self, rows: Sequence[Bound], tokens: npt.NDArray[np.int32]) -> None:
        """tokens: [S], what was drawn under the masks of these rows."""
        for bound, token in zip(rows, tokens.tolist(), strict=True):
            if bound.over or bound.fault:
                continue
            if token in bound.ends:
                bound.over = True
            else:
                bound.making.result().consume_token(token)

    def masks(self, rows: Sequence[Bound], output_index: Ints) -> Masks:
        """For rows that know all tokens before; output_index: [S], of the token to draw. Faulty rows may draw any."""
        words = -(-self.vocab_size // 32)
        bits = np.full((len(rows), words), -1, np.int32)
        faults: dict[int, str] = {}
        jobs = []
        until_s = time.monotonic() + self._patience_s
        for place, bound in enumerate(rows):
            if bound.over or bound.fault:
                continue
            matcher, fault = self._matcher(bound, until_s)
            if matcher is not None:
                jobs.append((matcher, place))
            else:
                faults[place] = fault
        if jobs:
            self._executor.unsafe_compute_mask_ptr(jobs, bits.ctypes.data, 4 * words, len(rows))
        for matcher, place in jobs:
            bound, row = rows[place], bits[place]
            _settle_ends(bound, row, int(output_index[place]))
            if fault := fault_of(matcher):
                # This text gets into records, where nothing of what a client wrote may stand.
                plain = fault == NOTHING or fault.startswith("lexer error")
                faults[place] = f"{bound.grammar.param or 'grammar'}: {fault if plain else 'it cannot go on'}"
                row[:] = -1
        for place in faults:
            rows[place].fault = True
        return Masks(bits, faults)

    def _matcher(self, bound: Bound, until_s: float) -> tuple[LLMatcher | None, str]:
        """The row's matcher, or why there is none: an empty text if it is being made."""
        try:
            return bound.making.result(max(until_s - time.monotonic(), 0)), ""
        except NotYet:
            return None, ""
        except (ConfigError, ValueError) as error:
            return None, f"structured output is not available: {error}"


def _settle_ends(bound: Bound, bits: Bits, output_index: int) -> None:
    """Where the grammar allows an end, the request's stop tokens are one too. Ends that the request does not want yet
    are left out, if anything else may come."""
    words, ones = _bits(bound.eos)
    if not (bits[words] & ones).any():
        return
    _set(bits, bound.ends)
    unwanted = bound.ends if output_index < bound.min_tokens else bound.eos if bound.ignores_eos else frozenset()
    if unwanted:
        rest = bits.copy()
        _clear(rest, unwanted)
        if rest.any():
            bits[:] = rest


def _bits(tokens: frozenset[int]) -> tuple[Ints, Bits]:
    ids = np.fromiter(tokens, np.int64, len(tokens))
    return ids // 32, np.left_shift(1, ids % 32).astype(np.uint32).view(np.int32)


def _set(bits: Bits, tokens: frozenset[int]) -> None:
    np.bitwise_or.at(bits, *_bits(tokens))


def _clear(bits: Bits, tokens: frozenset[int]) -> None:
    words, ones = _bits(tokens)
    np.bitwise_and.at(bits, words, ~ones)
