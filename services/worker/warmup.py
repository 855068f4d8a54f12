"""Plans that no scheduler made: to compile what serving will run, and to measure the memory of the largest step.

Pure. Each plan starts its rows on slots from 0; the rows are to be reset before the next. Rows share blocks, whose
content means nothing, so that the cache may be as small as one step's tokens.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from common.columns import pack_i32
from common.logprobs import Report
from common.pooling import MODES, Pooling
from common.protocol import Grammar, KvGroup, RowStart, RowTable, Sampling, StepPlan
from services.worker.graphs import GraphKey
from services.worker.memory import Shape
from services.worker.reports import SLICE

GREEDY = Sampling(max_tokens=2, temperature=0.0)
BIAS = ((0, 1.0),)  # as all that changes logits it makes them fp32
# Every way through the sampler of rows that may have drafts.
DRAFTED = (
    GREEDY,
    Sampling(max_tokens=2, temperature=0.7),
    Sampling(max_tokens=2, temperature=0.7, top_k=20, top_p=0.9),
    Sampling(max_tokens=2, temperature=0.7, min_p=0.1),
    Sampling(max_tokens=2, temperature=0.0, logit_bias=BIAS),
    Sampling(max_tokens=2, temperature=0.7, logit_bias=BIAS),
    Sampling(max_tokens=2, temperature=0.7, top_p=0.9, min_p=0.05, logit_bias=BIAS),
)
# And of the others; the last is the one that takes the most memory.
MANNERS = (
    *DRAFTED,
    Sampling(max_tokens=2, temperature=0.0, grammar=Grammar("regex", "a*")),
    Sampling(
        max_tokens=2,
        temperature=0.7,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias=BIAS,
        min_tokens=2,
        grammar=Grammar("regex", "a*"),  # drawn twice
    ),
)
# Prompts that become vectors, and what comes with log-probabilities.
VECTORS = tuple(Sampling(max_tokens=0, report=Report(pooling=Pooling(mode))) for mode in MODES)
REPORTED = Sampling(max_tokens=2, temperature=0.0, report=Report(top=1, prompt=1))
MOST_STATES = 32  # a state is large, and a small cache has few
DECODE_CONTEXT = 512  # tokens of rows that decode
FAR = 8192  # a context longer than what an indexer chooses of it, and than any other by which kernels are chosen


class Work(NamedTuple):
    """One row of a plan: `num_tokens` from `position` on, the last one sampled from or not."""

    position: int
    num_tokens: int
    samples: bool
    sampling: Sampling


class Sizes(NamedTuple):
    """What bounds a step, as the scheduler does."""

    shape: Shape
    step_tokens: int
    chunk_tokens: int  # of one row in one step, 0: no bound
    groups: tuple[KvGroup, ...] = ()  # of the model, as in ModelFacts
    drafts: int = 0  # of one row
    draft_rows: int = 0  # in one step
    fewest: int = 0  # blocks of the smallest pool of pages that the plans run in; 0: there are enough
    vectors: bool = False  # whether the model gives any

    @property
    def most_entries(self) -> int:
        """Rows that decode, each draft counted as one more."""
        return max(self.num_rows, self.most_drafting * (1 + self.drafts))

    @property
    def most_drafting(self) -> int:
        """Rows of a step, all of which have all their drafts."""
        return min(self.num_rows, self.draft_rows, max(self.step_tokens // (1 + self.drafts), 1))

    @property
    def longest(self) -> int:
        """Tokens of one row in one step."""
        most = min(self.step_tokens, self.shape.max_len - 1)
        if self.fewest:
            most = min(most, self.fewest * self.shape.block_tokens)
        return min(most, self.chunk_tokens) if self.chunk_tokens else most

    def behind(self, num_tokens: int) -> int:
        """Where so many tokens of a row begin that are far in it."""
        return max(min(FAR, self.shape.max_len - 1 - num_tokens), 0)

    @property
    def num_rows(self) -> int:
        return min(self.shape.max_rows, self.step_tokens)

    @property
    def num_blocks(self) -> int:
        """Of a cache that all plans below can run in: tokens that a row writes in one step never share a place."""
        needed = -(-self.longest // self.shape.block_tokens) + 1
        return min(needed, self.fewest) if self.fewest else needed

    @property
    def num_states(self) -> int:
        """Of the same: rows of a step share none, as long as they are not many."""
        return min(self.num_rows, MOST_STATES)


def largest_steps(sizes: Sizes) -> Iterator[StepPlan]:
    """Steps that take as much memory as any: all tokens in all rows, all drawn from; and the end of a long prompt."""
    share, more = divmod(sizes.step_tokens, sizes.num_rows)
    for sampling in (MANNERS[0], MANNERS[-1]):
        yield make_plan(
            sizes,
            [Work(0, min(share + (i < more), sizes.longest), True, sampling) for i in range(sizes.num_rows)],
        )
    yield make_plan(sizes, [Work(sizes.shape.max_len - 1 - sizes.longest, sizes.longest, True, MANNERS[-1])])
    if sizes.vectors:
        yield make_plan(sizes, [Work(0, sizes.longest, False, VECTORS[-1])])  # hidden states of all tokens
    if sizes.drafts:
        for sampling in (DRAFTED[0], DRAFTED[-1]):
            yield draft_step(sizes, sizes.most_drafting, sampling)


def first_steps(sizes: Sizes) -> Iterator[StepPlan]:
    """A prompt and a decode step, so that the first request finds memory mapped and libraries initialized."""
    yield make_plan(sizes, [Work(0, min(sizes.longest, 256), True, GREEDY)])
    yield decode_step(sizes, 1)


def decode_step(sizes: Sizes, num_rows: int, sampling: Sampling = GREEDY) -> StepPlan:
    """`num_rows` rows with one token each."""
    position = min(DECODE_CONTEXT, sizes.shape.max_len - 1) - 1
    return make_plan(sizes, [Work(position, 1, True, sampling)] * num_rows)


def draft_step(sizes: Sizes, num_rows: int, sampling: Sampling) -> StepPlan:
    """`num_rows` rows with all their drafts."""
    position = max(min(DECODE_CONTEXT, sizes.shape.max_len - 1) - 1 - sizes.drafts, 0)
    work = [Work(position, 1 + sizes.drafts, True, sampling)] * num_rows
    return make_plan(sizes, work, drafting=num_rows)


def captured_steps(sizes: Sizes, keys: Sequence[GraphKey]) -> Iterator[StepPlan]:
    """Steps as large as the largest of the layouts that are captured, which know of no row how long it is."""
    entries = max(key.decode for key in keys)
    rows = min(entries, sizes.num_rows)
    last = sizes.shape.max_len - 2
    work = [Work(min(DECODE_CONTEXT - 1, last), 1, True, GREEDY)] * rows
    yield make_plan(sizes, [Work(max(last, 0), 1, True, GREEDY), *work[1:]])
    if sizes.drafts:
        yield draft_step(sizes, sizes.most_drafting, GREEDY)
    for long in (False, True):
        alike = [key for key in keys if key.chunk and key.long == long]
        chunk = min(max((key.chunk for key in alike), default=0), sizes.longest)
        if chunk > 1:
            beside = min(max(key.decode for key in alike), sizes.num_rows - 1)
            position = min(DECODE_CONTEXT, sizes.shape.max_len - 1) - 1
            behind = sizes.shape.max_len - 1 - chunk if long else 0
            yield make_plan(sizes, [*[Work(position, 1, True, GREEDY)] * beside, Work(behind, chunk, True, GREEDY)])


def all_kinds(sizes: Sizes) -> Iterator[StepPlan]:
    """Steps that together run every kind of work that serving may ask for, so that none is compiled later.

    Kernels are chosen by powers of two of rows and tokens, and by whether a context is long. What brings an op that
    only torch has is not among them, but in `reporting`.
    """
    yield from _drafts(sizes)
    yield from _decodes(sizes)
    yield from _chunks(sizes)
    yield from _beside(sizes)
    for sampling in VECTORS if sizes.vectors else ():
        for count in sorted({1, min(sizes.longest, 40), sizes.longest}):
            yield make_plan(sizes, [Work(0, count, False, sampling)])


def reporting(sizes: Sizes) -> Iterator[StepPlan]:
    """The same, of log-probabilities: of tokens, and of prompts as long as what has logits at once."""
    yield decode_step(sizes, min(2, sizes.num_rows), REPORTED)
    most = min(sizes.longest, 2 * SLICE)
    for count in (*_powers(16, most), most):
        yield make_plan(sizes, [Work(0, count, True, REPORTED)])


def _drafts(sizes: Sizes) -> Iterator[StepPlan]:
    if sizes.drafts:
        for num_rows in sorted({1, sizes.most_drafting}):
            for sampling in DRAFTED:
                yield draft_step(sizes, num_rows, sampling)


def _decodes(sizes: Sizes) -> Iterator[StepPlan]:
    # a few rows and some rows are sampled in other ways than many
    for num_rows in sorted({1, min(16, sizes.num_rows), sizes.num_rows}):
        for sampling in MANNERS:
            yield decode_step(sizes, num_rows, sampling)
    for num_rows in _powers(2, sizes.num_rows):
        yield decode_step(sizes, num_rows)
    for num_rows in sorted({1, *_powers(16, sizes.num_rows), sizes.num_rows}):
        yield make_plan(sizes, [Work(sizes.behind(1), 1, True, GREEDY)] * num_rows)


def _chunks(sizes: Sizes) -> Iterator[StepPlan]:
    """Of one row: at the start of a prompt, and far in it."""
    for count in _powers(16, sizes.longest):
        yield make_plan(sizes, [Work(0, count, True, GREEDY)])
        yield make_plan(sizes, [Work(sizes.behind(count), count, True, GREEDY)])
    for count in sorted({1, min(sizes.longest, 40), sizes.longest}):
        for samples in (False, True):
            yield make_plan(sizes, [Work(0, count, samples, GREEDY)])
    # so many that they are no rows of one token each, and few enough that keys and values are not made of latents
    count = min(sizes.longest, 128)
    yield make_plan(sizes, [Work(min(DECODE_CONTEXT, sizes.behind(count)), count, True, GREEDY)])
    yield make_plan(sizes, [Work(sizes.behind(sizes.longest), sizes.longest, True, GREEDY)])


def _beside(sizes: Sizes) -> Iterator[StepPlan]:
    """A chunk beside rows that decode: one, and more than one sampled row."""
    some = min(sizes.longest, 40)
    if sizes.num_rows == 1 or some == 1:
        return
    position = min(DECODE_CONTEXT, sizes.shape.max_len - 1) - 1
    decoding = [Work(position, 1, True, sampling) for sampling in MANNERS][: sizes.num_rows - 1]
    for beside in (decoding[:1], decoding):
        count = min(some, sizes.step_tokens - len(beside))
        if count > 0:
            yield make_plan(sizes, [*beside, Work(0, count, False, GREEDY)])
            yield make_plan(sizes, [*beside, Work(sizes.behind(count), count, False, GREEDY)])


def _powers(first: int, last: int) -> Iterator[int]:
    """first, 2 * first, ... below `last`."""
    while first < last:
        yield first
        first *= 2


def make_plan(sizes: Sizes, work: Sequence[Work], drafting: int = 0) -> StepPlan:
    """`drafting`: rows, the first ones, whose tokens after the first are drafts."""
    block_tokens = sizes.shape.block_tokens
    added = []
    for slot, row in enumerate(work):
        end = row.position + row.num_tokens
        # a row that does not sample has a token more than it computes
        tokens = end if row.samples else end + 1
        table = RowTable(0, pack_i32(idx % sizes.num_blocks for idx in range(-(-end // block_tokens))))
        if slot < drafting:
            tokens = row.position + 1
        added.append(
            RowStart(
                slot=slot,
                seq_id=slot,
                tokens=bytes(4 * tokens),
                num_prompt=tokens,
                computed=row.position,
                blocks=table.blocks,
                sampling=row.sampling,
                tables=tuple(
                    RowTable(0, pack_i32((slot % sizes.num_states,))) if group.kind == "state" else table
                    for group in sizes.groups[1:]
                ),
            )
        )
    return StepPlan(
        step=0,
        added=added,
        slots=pack_i32(range(len(work))),
        positions=pack_i32(row.position for row in work),
        counts=pack_i32(row.num_tokens for row in work),
        samples=bytes(row.samples for row in work),
        drafting=drafting,
    )
