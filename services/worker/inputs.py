"""From a step's rows to the frozen batch that the model and the sampler take. Pure; called by the runner.

Shapes: R rows, T tokens of all rows, S rows that sample, M blocks of the longest row. All index arithmetic is on the
host with numpy: a plan decides it, no device value does. `put` takes a host array and gives the tensor that it will be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.worker.block_tables import BlockTables, places_of
from services.worker.groups import GroupStep
from services.worker.kernels.draft_entries import DraftEntries
from services.worker.kernels.ops.paged_attention import AttentionRows, ChunkLoad
from services.worker.state import Ints, Rows, Step

Put = Callable[[npt.NDArray[np.generic]], Tensor]
NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Limits:
    """Which tokens a row may draw."""

    top_k: Tensor  # int64 [S], 0: no limit
    top_p: Tensor  # float32 [S], 1: no limit
    min_p: Tensor  # float32 [S], 0: no limit
    max_k: int


@dataclass(frozen=True)
class Draw:
    """How each row draws its token."""

    temperature: Tensor  # float32 [S], 0: greedy
    seeds: Tensor  # int64 [S]
    positions: Tensor  # int64 [S], output index
    limits: Limits | None  # None: no row has one


@dataclass(frozen=True)
class Penalties:
    """Rows (of S) with a penalty."""

    index: Tensor  # int64
    slots: Tensor  # int64
    presence: Tensor  # float32
    frequency: Tensor  # float32
    repetition: Tensor  # float32


@dataclass(frozen=True)
class Only:
    """Rows (of S) of which only some tokens may come."""

    rows: Tensor  # int64
    index: Tensor  # int64, row * V + token


@dataclass(frozen=True)
class Banned:
    """Tokens that may not come where the row's last ones are those before them in a banned word. W words, L tokens."""

    tokens: Tensor  # Rows.tokens
    index: Tensor  # int64 [W], row (of S) * V + token
    places: Tensor  # int64 [W, L], of the row's last tokens, flat in Rows.tokens
    before: Tensor  # int32 [W, L], what they must be; -1: anything


@dataclass(frozen=True)
class LogitEdits:
    """Values to add to single logits: logit_bias, and -inf for ends before min_tokens; and what may come at all."""

    index: Tensor  # int64, row (of S) * V + token
    values: Tensor  # float32
    only: Only | None = None
    banned: Banned | None = None


@dataclass(frozen=True)
class SamplingBatch:
    """What is not plain greedy in this step; each part is None where no row needs it."""

    draw: Draw | None
    penalties: Penalties | None
    edits: LogitEdits | None


@dataclass(frozen=True)
class ForwardBatch:
    token_places: Tensor  # int64 [T], flat in Rows.tokens
    token_rows: Tensor  # int32 [T], slots
    positions: Tensor  # int64 [T]
    kv_slots: Tensor  # int64 [T], block * block_tokens + offset
    rows: AttentionRows
    outputs: Tensor | None  # int64 [S], of T; None: every token is sampled from
    sampled_places: Tensor  # int64 [S], flat in Rows.tokens
    beside: tuple[GroupStep, ...] = ()  # of the groups behind the first one


def build(step: Step, rows: Rows, put: Put, offsets: npt.NDArray[np.int32] | None = None) -> ForwardBatch:
    """The batch of a step that `Rows.apply` has checked; at least one row. `offsets`: of entries (drafts.Entries)."""
    slots, counts = step.slots, step.counts
    context = step.positions + counts
    max_query = int(counts.max())
    ends = np.cumsum(counts)
    if max_query == 1:
        token_slots, positions = slots, step.positions
    else:
        token_slots = np.repeat(slots, counts)
        positions = np.arange(ends[-1]) + np.repeat(step.positions - (ends - counts), counts)
    row_len = rows.tokens.shape[1]
    samples = step.samples
    everything = max_query == 1 and bool(samples.all())
    if rows.resident is None:
        width = -(-int(context.max()) // rows.block_tokens)
        tables, table_rows = put(rows.tables[slots, :width]), None
    else:
        tables, table_rows = rows.resident, put(slots.astype(np.int32))
    longer = np.flatnonzero(counts > 1)
    drafts = None
    if offsets is not None and rows.drafts is not None and rows.has_states:
        drafts = DraftEntries(put(offsets), put(slots.astype(np.int32)), rows.drafts.held)
    first = AttentionRows(
        query_starts=put(np.concatenate(([0], ends)).astype(np.int32)),
        context_lens=put(context.astype(np.int32)),
        block_tables=tables,
        block_tokens=rows.block_tokens,
        max_query=max_query,
        max_context=int(context.max()),
        num_decode=int(longer[0]) if len(longer) else len(slots),
        table_rows=table_rows,
        chunk_load=ChunkLoad.of(counts, context),
        drafts=drafts,
    )
    return ForwardBatch(
        token_places=put(token_slots * row_len + positions),
        token_rows=put(token_slots.astype(np.int32)),
        positions=put(positions),
        kv_slots=put(places_of(rows.tables, token_slots, positions, rows.block_tokens)),
        rows=first,
        outputs=None if everything else put(ends[samples] - 1),
        sampled_places=put(slots[samples] * row_len + context[samples]),
        beside=tuple(_beside(more, first, token_slots, positions, slots, put) for more in rows.beside),
    )


def _beside(
    more: BlockTables, first: AttentionRows, token_slots: Ints, positions: Ints, slots: Ints, put: Put
) -> GroupStep:
    """Of a group behind the first one, whose rows are `first`."""
    if more.is_state:
        return GroupStep(put(more.tables[slots, 0].astype(np.int64)), first)
    places = put(places_of(more.tables, token_slots, positions, first.block_tokens))
    if more.resident is not None:
        return GroupStep(places, replace(first, block_tables=more.resident))
    width = -(-first.max_context // first.block_tokens)
    return GroupStep(places, replace(first, block_tables=put(more.tables[slots, :width])))


def sampling_batch(slots: Ints, context: Ints, rows: Rows, put: Put) -> SamplingBatch | None:
    """How to draw for rows that sample. context: each row's tokens before the one that is sampled."""
    columns = rows.sampling[slots]
    output_index = context - rows.num_prompt[slots]
    draw = _draw(columns, output_index, put) if columns["temperature"].any() else None
    edits = _edits(slots, output_index, rows, put) if rows.edits else None
    penalties = _penalties(columns, slots, put) if rows.penalties is not None else None
    if draw is None and edits is None and penalties is None:
        return None
    return SamplingBatch(draw, penalties, edits)


def _draw(columns: npt.NDArray[np.void], output_index: Ints, put: Put) -> Draw:
    top_k, top_p, min_p = columns["top_k"], columns["top_p"], columns["min_p"]
    limited = (columns["temperature"] > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))

    def column(values: npt.NDArray[np.generic]) -> Tensor:
        return put(np.ascontiguousarray(values))

    return Draw(
        temperature=column(columns["temperature"]),
        seeds=column(columns["seed"]),
        positions=column(output_index),
        limits=Limits(column(top_k), column(top_p), column(min_p), int(top_k.max())) if limited.any() else None,
    )


def _penalties(columns: npt.NDArray[np.void], slots: Ints, put: Put) -> Penalties | None:
    index = np.flatnonzero((columns["presence"] != 0) | (columns["frequency"] != 0) | (columns["repetition"] != 1))
    if not len(index):
        return None
    columns = columns[index]
    names = ("presence", "frequency", "repetition")
    presence, frequency, repetition = (put(np.ascontiguousarray(columns[name])) for name in names)
    return Penalties(put(index), put(slots[index]), presence, frequency, repetition)


def _edits(slots: Ints, output_index: Ints, rows: Rows, put: Put) -> LogitEdits | None:
    index, values = [NONE], [np.zeros(0, np.float32)]
    narrow: list[int] = []
    allowed, banned = [NONE], list[tuple[int, int, tuple[int, ...]]]()
    for j, slot in enumerate(slots.tolist()):
        edits = rows.edits.get(slot)
        if edits is None:
            continue
        index.append(edits.bias_ids + j * rows.vocab_size)
        values.append(edits.bias_values)
        if output_index[j] < rows.sampling["min_tokens"][slot]:
            index.append(edits.end_ids + j * rows.vocab_size)
            values.append(np.full(len(edits.end_ids), -np.inf, np.float32))
        if len(edits.allowed):
            narrow.append(j)
            allowed.append(edits.allowed + j * rows.vocab_size)
        end = slot * rows.tokens.shape[1] + int(rows.num_prompt[slot]) + int(output_index[j])
        banned += [(j, end, word) for word in edits.banned if len(word) <= output_index[j] + 1]
    flat = np.concatenate(index)
    if not (len(flat) or narrow or banned):
        return None
    only = Only(put(np.array(narrow, np.int64)), put(np.concatenate(allowed))) if narrow else None
    return LogitEdits(put(flat), put(np.concatenate(values)), only, _banned(banned, rows, put) if banned else None)


def _banned(words: Sequence[tuple[int, int, tuple[int, ...]]], rows: Rows, put: Put) -> Banned:
    """words: row, place behind the row's last token, tokens; only those that the output is long enough for."""
    length = max(len(word) for _, _, word in words) - 1
    before = np.full((len(words), length), -1, np.int32)
    for line, (_, _, word) in enumerate(words):
        before[line, length - len(word) + 1 :] = word[:-1]
    ends = np.array([end for _, end, _ in words], np.int64)
    places = np.maximum(ends[:, None] - length + np.arange(length), 0)
    index = np.array([row * rows.vocab_size + word[-1] for row, _, word in words], np.int64)
    return Banned(rows.tokens, put(index), put(places), put(before))
